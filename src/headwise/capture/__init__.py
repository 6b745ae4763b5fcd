"""Capture every attention call of a model as it happens: its tensors, its rule and its site."""

from headwise.capture._call import AttentionCall as AttentionCall
from headwise.capture._call import GraphCall as GraphCall
from headwise.capture._call import OfGraph as OfGraph
from headwise.capture._capture import Capture as Capture
from headwise.capture._follow_graphs import follow_graphs as follow_graphs
from headwise.capture._follow_graphs import may_follow as may_follow
from headwise.capture._follow_graphs import may_stand_at as may_stand_at
from headwise.capture._inputs import InputTracker as InputTracker
from headwise.capture._inputs import StackInputs as StackInputs
from headwise.capture._inputs import Text as Text
from headwise.capture._open import capture_calls as capture_calls
from headwise.capture._open import open_capture as open_capture
from headwise.capture._running_calls import ModuleCall as ModuleCall
from headwise.capture._site import Site as Site
from headwise.capture._softmax import SoftmaxCall as SoftmaxCall
from headwise.capture._stacks import find_stacks as find_stacks
