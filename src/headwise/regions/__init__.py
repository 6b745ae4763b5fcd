"""Which pixels each image token is made of, measured through the user's own processor."""

from headwise.regions._image_regions import ImageRegions as ImageRegions
from headwise.regions._image_regions import image_regions as image_regions
