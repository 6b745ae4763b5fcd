"""Importance scores: how much each head matters to what a model should keep doing."""

from headwise.scoring._batches import BatchesLike as BatchesLike
from headwise.scoring._batches import paired as paired
from headwise.scoring._batches import read_batches as read_batches
from headwise.scoring._curves import in_fifths as in_fifths
from headwise.scoring._curves import prune_curves as prune_curves
from headwise.scoring._gated_model import GatedModel as GatedModel
from headwise.scoring._importance import importance as importance
from headwise.scoring._loss import EMBEDDING as EMBEDDING
from headwise.scoring._loss import Inputs as Inputs
from headwise.scoring._loss import Loss as Loss
from headwise.scoring._loss import Score as Score
from headwise.scoring._loss import find_loss as find_loss
from headwise.scoring._loss import rank_correlation as rank_correlation
from headwise.scoring._loss import token_losses as token_losses
from headwise.scoring.methods import Gates as Gates
