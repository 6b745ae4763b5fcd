"""The evidence for roles: nulls, tests against them, and planted heads that these must find."""

from headwise.roles.evidence._control import POWER as POWER
from headwise.roles.evidence._control import least_lift as least_lift
from headwise.roles.evidence._control import plant as plant
from headwise.roles.evidence._hypotheses import FEWEST_TEXTS as FEWEST_TEXTS
from headwise.roles.evidence._hypotheses import LEVEL as LEVEL
from headwise.roles.evidence._hypotheses import Hypotheses as Hypotheses
from headwise.roles.evidence._hypotheses import has_role as has_role
from headwise.roles.evidence._hypotheses import is_promising as is_promising
from headwise.roles.evidence._hypotheses import lift as lift
from headwise.roles.evidence._hypotheses import of_examples as of_examples
from headwise.roles.evidence._hypotheses import run_tests as run_tests
from headwise.roles.evidence._hypotheses import why_not as why_not
from headwise.roles.evidence._nulls import NULLS as NULLS
from headwise.roles.evidence._nulls import RULE as RULE
from headwise.roles.evidence._nulls import Baseline as Baseline
from headwise.roles.evidence._nulls import Evidence as Evidence
from headwise.roles.evidence._nulls import hypotheses_of as hypotheses_of
from headwise.roles.evidence._nulls import null_head_baseline as null_head_baseline
from headwise.roles.evidence._nulls import strongest as strongest
from headwise.roles.evidence._significance import step_down as step_down
