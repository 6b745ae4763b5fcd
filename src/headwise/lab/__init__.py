"""The Mini-GPT lab: a small model, its training on a generated grammar, and its evaluation."""

from headwise.lab._checkpoint import read_model as read_model
from headwise.lab._checkpoint import read_tokenizer as read_tokenizer
from headwise.lab._checkpoint import save as save
from headwise.lab._evaluate import evaluate as evaluate
from headwise.lab._model import MiniGPT as MiniGPT
from headwise.lab._model import MiniGPTConfig as MiniGPTConfig
from headwise.lab._model import encode_prompt as encode_prompt
from headwise.lab._model import make_tokenizer as make_tokenizer
from headwise.lab._model import sample as sample
from headwise.lab._train import Trained as Trained
from headwise.lab._train import TrainSettings as TrainSettings
from headwise.lab._train import train as train
