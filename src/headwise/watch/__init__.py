"""Watch the heads of a model while it runs; its output is unchanged to the last bit."""

from headwise.watch._attentions import attentions as attentions
from headwise.watch._links import Word as Word
from headwise.watch._links import links as links
from headwise.watch._links import links_of as links_of
from headwise.watch._links import word_tokens as word_tokens
from headwise.watch._maps import Layer as Layer
from headwise.watch._observe import check_arguments as check_arguments
from headwise.watch._observe import observe as observe
from headwise.watch._pieces import BATCH_SIZE as BATCH_SIZE
from headwise.watch._pieces import run_pieces as run_pieces
from headwise.watch._pieces import watch_pieces as watch_pieces
from headwise.watch._recorder import Recorder as Recorder
from headwise.watch._request import DEFAULT as DEFAULT
from headwise.watch._request import Relation as Relation
from headwise.watch._request import Request as Request
from headwise.watch._spans import Stretch as Stretch
from headwise.watch._spans import read_stretches as read_stretches
from headwise.watch._spans import stretch_tokens as stretch_tokens
from headwise.watch._watch import Watch as Watch
