"""The study of a model's heads, the page that shows it, and a look at one text."""

from headwise.report._compare import compare as compare
from headwise.report._compare_tables import compare_tables as compare_tables
from headwise.report._comparison import Comparison as Comparison
from headwise.report._image_look import ImageLook as ImageLook
from headwise.report._look import Look as Look
from headwise.report._passes import observe_texts as observe_texts
from headwise.report._passes import pairs_for as pairs_for
from headwise.report._samples import Sample as Sample
from headwise.report._samples import TopPairs as TopPairs
from headwise.report._single_text import look as look
from headwise.report._stages import About as About
from headwise.report._stages import roles_of_lab as roles_of_lab
from headwise.report._stages import study as study
from headwise.report._stages import study_lab as study_lab
from headwise.report._study import Study as Study
from headwise.report._study import load_study as load_study
