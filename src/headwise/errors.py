"""Every error that headwise raises on purpose.

HeadwiseError
├── ShapeError        sizes that do not fit together           (also a ValueError)
├── ArgumentError     an argument with a value it cannot have  (also a ValueError)
├── MaskError         a mask of the wrong kind                 (also a TypeError)
├── HeadError         a head that does not exist               (also a LookupError)
├── InputError        a file or folder that cannot be read     (also a ValueError)
├── OutputError       a place that cannot be written           (also an OSError)
└── UnsupportedError  a model that cannot be handled exactly   (also a NotImplementedError)

A message reads `where: what is wrong (names and values). What to do.`
"""


class HeadwiseError(Exception):
    """The root of the tree: catch this to catch everything headwise raises on purpose."""


class ShapeError(HeadwiseError, ValueError):
    """Sizes do not fit together."""


class ArgumentError(HeadwiseError, ValueError):
    """An argument has a value that it cannot have, or two arguments contradict each other."""


class MaskError(HeadwiseError, TypeError):
    """A mask is neither boolean (True = may attend) nor additive (float)."""


class HeadError(HeadwiseError, LookupError):
    """A head is named that the model or table does not have, or its name cannot be read."""


class InputError(HeadwiseError, ValueError):
    """A file or folder is missing, unreadable, unsafe, or not what it should be."""


class OutputError(HeadwiseError, OSError):
    """A result cannot be written where it was asked for; nothing was left behind there."""


class UnsupportedError(HeadwiseError, NotImplementedError):
    """A model does something that cannot be handled exactly, so it is refused."""
