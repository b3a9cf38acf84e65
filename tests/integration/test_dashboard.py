"""The dashboard in real Chromium: what a person sees, with a mouse or without, wide or narrow, light or dark."""

import os
import shutil
import unittest

import numpy as np
import tqkv

import browser
from daemon import DEMO, IS_SANITIZED, Daemon

TAB, ENTER = "\ue004", "\ue007"


@unittest.skipIf(IS_SANITIZED, "the page does not depend on the build")
@unittest.skipUnless(browser.is_there(), "chromium and chromedriver are not installed")
class Dashboard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon("--backend", "cpu", "--pool", DEMO)
        cls.client = tqkv.Client(cls.daemon.addr)
        cls.session = cls.client.open("demo", "chat-17")
        rows = np.random.default_rng(1).standard_normal((2, 40, 2, 64)).astype(np.float32)
        for sequence in range(1, 6):
            cls.session.append_layers(sequence, rows, rows)
        cls.browser = browser.Browser(1200, 900)
        cls.addClassCleanup(cls.finish)

    @classmethod
    def finish(cls):
        cls.browser.close()
        cls.client.close()
        code = cls.daemon.stop()
        shutil.rmtree(cls.daemon.folder, ignore_errors=True)
        assert code == 0, code

    def setUp(self):
        self.browser.size(1200, 900)
        self.browser.dark(False)
        self.browser.open(f"http://{self.daemon.http}/")
        self.wait_text("#health .text", "ready")
        self.browser.wait("return document.querySelectorAll('#tiles .tile').length === 6")

    def text(self, selector):
        return self.browser.run("return document.querySelector(arguments[0]).textContent", selector)

    def wait_text(self, selector, part):
        self.browser.wait("return document.querySelector(arguments[0]).textContent.includes(arguments[1])", selector, part)

    def focused(self):
        return self.browser.run("const e = document.activeElement; return e.id || e.textContent.trim()")

    def shot(self, name):
        """For looking at, where somebody asks for it."""
        folder = os.environ.get("TQKV_SCREENSHOTS")
        if folder:
            self.browser.screenshot(f"{folder}/{name}.png")

    def test_what_it_shows(self):
        """The figures are the API's, the map adds up, nothing is loaded from elsewhere, nothing fails in the console."""
        occupancy = self.daemon.get("/v1/occupancy")
        blocks = occupancy["pools"][0]["blocks"]
        self.assertEqual((blocks["total"], blocks["free"]), (64, 49))
        self.assertIn("15 of 64", self.text("#tiles"))
        self.assertIn(f"{occupancy['totals']['memory']['compression']:.2f}×", self.text("#tiles"))
        cells = self.browser.run("""const n = {};
            for (const cell of document.querySelectorAll(".map i")) n[cell.className] = (n[cell.className] || 0) + 1;
            return n""")
        self.assertEqual(cells, {"owned": 15, "free": 49})
        label = self.browser.run("return document.querySelector('.map').getAttribute('aria-label')")
        self.assertEqual(label, "demo: 15 owned, 49 free of 64 blocks")
        self.assertIn("chat-17", self.text("#sessions tbody"))
        self.assertIn(self.daemon.get("/v1/info")["backend_reason"], self.text("#chosen"))
        for step in range(40, 44):  # something to draw
            self.session.decode_batch({n: np.ones((4, 64), np.float32) for n in range(1, 6)}, 0)
            self.browser.run("round()")
            self.browser.wait("return samples.length > arguments[0]", step - 39)
        self.browser.wait("return document.querySelector('#chart_requests path').getAttribute('d').includes('L')")
        loaded = self.browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        self.assertTrue(loaded)
        self.assertEqual([url for url in loaded if not url.startswith(f"http://{self.daemon.http}/")], [])
        self.assertEqual(self.browser.console(), [])
        self.shot("light")

    def test_a_rejection_is_told(self):
        with self.assertRaises(tqkv.TqkvError):
            self.session.decode(999, 0, np.zeros((4, 64), np.float32))
        self.wait_text("#rejections", "NOT_FOUND")

    def test_narrow(self):
        """400 px: nothing is cut off sideways, what is wider scrolls by itself and can be reached by keyboard."""
        self.browser.size(400, 800)
        self.assertTrue(self.browser.run("return document.scrollingElement.scrollWidth <= innerWidth"))
        wide = self.browser.run("""return [...document.querySelectorAll("main *")].filter((e) =>
            e.getBoundingClientRect().right > 401 && !e.closest(".scroll")).map((e) => e.tagName + "#" + e.id)""")
        self.assertEqual(wide, [])
        self.shot("narrow")

    def test_dark(self):
        light = self.browser.run("return getComputedStyle(document.body).backgroundColor")
        self.browser.dark(True)
        dark = self.browser.run("return getComputedStyle(document.body).backgroundColor")
        self.assertNotEqual(light, dark)
        self.assertEqual(dark, "rgb(13, 13, 13)")
        self.shot("dark")

    def test_by_keyboard(self):
        """Tab reaches everything in order, Enter works it, and drawing anew does not take the focus away."""
        self.browser.press(TAB)
        self.assertEqual(self.focused(), "Skip to occupancy")
        self.browser.press(TAB)
        self.assertEqual(self.focused(), "interval")
        self.browser.press(TAB)
        self.assertEqual(self.focused(), "pause")
        self.browser.press(ENTER)
        self.assertEqual(self.text("#pause"), "Go on")
        self.browser.press(TAB, TAB)
        self.assertEqual(self.focused(), "Session")
        self.browser.press(ENTER)
        sorts = "return document.querySelector('#sessions th').getAttribute('aria-sort')"
        self.assertEqual(self.browser.run(sorts), "ascending")
        self.browser.press(ENTER)
        self.assertEqual(self.browser.run(sorts), "descending")
        self.browser.run("round()")
        self.browser.wait("return document.activeElement.textContent === 'Session'")

    def test_a_daemon_that_is_gone(self):
        """An old picture says that it is old."""
        other = Daemon("--backend", "cpu", "--pool", DEMO)
        try:
            self.browser.open(f"http://{other.http}/")
            self.wait_text("#health .text", "ready")
        finally:
            other.stop()
            shutil.rmtree(other.folder, ignore_errors=True)
        self.wait_text("#stale", "does not answer")
        self.assertEqual(self.text("#health .text"), "no answer")
        self.browser.console()


if __name__ == "__main__":
    unittest.main()
