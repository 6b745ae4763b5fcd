"""Which pixels each image token is made of, measured through the user's own processor."""

from headwise.regions._image_regions import image_regions as image_regions
from headwise.regions._table import ImageRegions as ImageRegions
