"""A headless Chromium, and the pages that `vpool view` writes in it."""

import contextlib
import shutil
import time

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1400,1400",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


@contextlib.contextmanager
def browser(profile):
    """A driver of Chromium with an empty profile; the test is skipped where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = Options()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


class Page:
    """One page, opened and ready."""

    def __init__(self, chrome, path, seconds=30):
        self.chrome = chrome
        chrome.get_log("browser")
        chrome.get(path.as_uri())
        end = time.monotonic() + seconds
        while self.run("return document.documentElement.dataset.ready") is None:
            assert time.monotonic() < end, f"not ready after {seconds} s: {self.problems()}"
            time.sleep(0.02)

    def run(self, script, *args):
        """What a script returns."""
        return self.chrome.execute_script(script, *args)

    def problems(self):
        """What the browser has complained of."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def choose(self, event):
        """Choose a moment as a script would."""
        self.run("window.vpoolPage.choose(arguments[0])", event)

    def timing(self, name):
        """Milliseconds: since the page was opened, or that a choice took."""
        return self.run("return window.vpoolPage.timings[arguments[0]]", name)

    def figures(self):
        """The figures of the chosen moment, by name."""
        return self.run(
            "return Object.fromEntries([...document.querySelectorAll('#figures dd')]"
            ".map((one) => [one.dataset.figure, Number(one.dataset.value)]))"
        )

    def rows(self, card):
        """The rows of a table: name, and the numbers of its cells."""
        return self.run(
            "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map((row) =>"
            " [row.dataset.name ?? row.dataset.segment ?? row.dataset.block,"
            " ...[...row.querySelectorAll('td[data-value]')].map((cell) => Number(cell.dataset.value))])",
            card,
        )

    def requests(self):
        """Addresses that were asked for, but files, data and the browser's own pages."""
        found = []
        for entry in self.chrome.get_log("performance"):
            if '"Network.requestWillBeSent"' in entry["message"]:
                address = entry["message"].split('"url":"')[1].split('"')[0]
                if not address.startswith(("file:", "data:", "chrome:", "chrome-untrusted:")):
                    found.append(address)
        return found
