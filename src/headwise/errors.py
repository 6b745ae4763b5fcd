"""Every error that headwise raises on purpose.

HeadwiseError
├── ShapeError        sizes that do not match                  (also a ValueError)
├── ArgumentError     an argument with an invalid value        (also a ValueError)
├── MaskError         a mask of the wrong dtype                (also a TypeError)
├── HeadError         a head that does not exist               (also a LookupError)
├── InputError        a file or folder that cannot be read     (also a ValueError)
├── OutputError       a path that cannot be written            (also an OSError)
├── UnsupportedError  a model that cannot be handled exactly   (also a NotImplementedError)
└── MissingPackageError  an optional package is not installed  (also an ImportError)

A message reads `function: what is wrong (names and values). What to do.`
"""


class HeadwiseError(Exception):
    """The root of the tree: catch this to catch everything headwise raises on purpose."""


class ShapeError(HeadwiseError, ValueError):
    """Sizes do not match."""


class ArgumentError(HeadwiseError, ValueError):
    """An argument has an invalid value, or two arguments contradict each other."""


class MaskError(HeadwiseError, TypeError):
    """A mask is neither boolean (True = may attend) nor additive (float)."""


class HeadError(HeadwiseError, LookupError):
    """A head does not exist in the model or table, or its name cannot be parsed."""


class InputError(HeadwiseError, ValueError):
    """A file or folder is missing, unreadable, unsafe, or has the wrong content."""


class OutputError(HeadwiseError, OSError):
    """A result cannot be written to the requested path. No partial file is left behind."""


class UnsupportedError(HeadwiseError, NotImplementedError):
    """A model does something that cannot be handled exactly."""


class MissingPackageError(HeadwiseError, ImportError):
    """A package that only this feature needs is not installed."""
