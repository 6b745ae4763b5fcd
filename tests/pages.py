"""What readers do on a page before they can use a part of it."""

from playwright.sync_api import Locator, Page


def scrolled_to(page: Page, selector: str) -> Locator:
    """The element, in view: select elements of heads are filled there."""
    element = page.locator(selector)
    element.scroll_into_view_if_needed()
    return element
