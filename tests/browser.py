"""A real browser for tests: Debian's Chromium, driven by Selenium; nothing is downloaded."""

import contextlib
import shutil

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@contextlib.contextmanager
def opened(profile, width=1280, height=900, dark=False):
    """A browser with an empty profile; the test is skipped where there is none."""
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("there is no browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="Selenium is not installed: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        resize(found, width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield found
    finally:
        found.quit()


def resize(found, width, height):
    """Set the size of the page itself, which may be narrower than a window can be."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    found.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def full_page(found, path, width):
    """Save a picture of the whole page."""
    resize(found, width, found.execute_script("return document.documentElement.scrollHeight"))
    found.save_screenshot(str(path))


def console(found):
    """What the console said since the last time."""
    return [entry["message"] for entry in found.get_log("browser")]
