"""The dashboard in real Chromium: what a person sees, with a mouse or without, wide or narrow, light or dark."""

import os
import pathlib
import shutil
import tempfile
import time
import unittest

import numpy as np
import tqkv

import browser
from daemon import DEMO, IS_SANITIZED, Daemon

READ, ADMIN = "read-token-0123456789", "admin-token-0123456789"
STATES = "name=states,layers=2,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=64,exact_tokens=32,exact_blocks=8"
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
        self.browser.console()  # of the page before, whose daemon may be gone

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
        self.assertIn(f"{occupancy['totals']['effective_compression']:.2f}×", self.text("#tiles b + small") + self.text("#tiles"))
        self.assertIn(f"of rows alone {occupancy['totals']['memory']['compression']:.2f}×", self.text("#tiles"))
        self.assertIn("2 layers, 2 KV heads × 64", self.text("#pools .facts"))
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
        for chart, line in (("blocks", "path.owned"), ("requests", "path.l1"), ("rows", "path.l2"), ("rows", "path.l3"), ("latency", "path.l1"),
                            ("latency", "path.l2")):
            self.browser.wait("return document.querySelector(arguments[0]).getAttribute('d').includes('L')", f"#chart_{chart} {line}")
        label = "return document.querySelector(arguments[0]).getAttribute('aria-label')"
        self.assertEqual(self.browser.run(label, "#chart_blocks"), "Blocks by state over time; now 15 owned, 49 free")
        self.assertRegex(self.browser.run(label, "#chart_latency"), r"^Request latency, p50 and p99; now \S+ (µs|ms|s) and ")
        self.assertRegex(self.text("#tiles"), r"p50 \S+ (µs|ms|s), p99 \S+ (µs|ms|s)")
        info = self.daemon.get("/v1/info")
        for part in (info["backend"], info["device"], info["io"], info["io_reason"], info["instruction_set"], info["boot_id"]):
            self.assertIn(part, self.text("#chosen"))
        loaded = self.browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        self.assertTrue(loaded)
        self.assertEqual([url for url in loaded if not url.startswith(f"http://{self.daemon.http}/")], [])
        self.assertEqual(self.browser.console(), [])
        self.shot("light")

    def test_tenants(self):
        """A tenant has a line: what it has, and what it may have where that is limited."""
        uid = str(os.getuid())
        control = tqkv.http.Control(self.daemon.http)
        control.set_tenant(uid, sessions=9, weight=3)
        self.browser.run("round()")
        self.wait_text("#tenants tbody", "1 of 9")
        cells = self.browser.run("return [...document.querySelectorAll('#tenants tbody td')].map((e) => e.textContent)")
        titles = self.browser.run("return [...document.querySelectorAll('#tenants thead th')].map((e) => e.textContent)")
        self.assertEqual(titles, ["Tenant", "Weight", "Bytes", "Tokens", "Sessions", "Requests", "Tier bytes", "Refused"])
        self.assertEqual((len(cells), cells[0], cells[1], cells[4], cells[6], cells[7]), (8, uid, "3", "1 of 9", "0 B", "0"))
        self.assertNotIn("of", cells[2])
        control.clear_tenant(uid)

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
        stuck = self.browser.run("""return [...document.querySelectorAll(".scroll")].filter((e) =>
            e.scrollWidth > e.clientWidth && e.tabIndex !== 0).length""")
        self.assertEqual(stuck, 0)
        hidden = self.browser.run("""return [...document.querySelectorAll(".scroll")].filter((e) =>
            e.scrollWidth > e.clientWidth).map((e) => e.getAttribute("aria-label"))""")
        self.assertEqual(hidden, [], "a table stands behind a scrollbar")
        self.assertEqual(self.browser.run("""return getComputedStyle(document.querySelector("#sessions td[data-title=Tokens]"),
            "::before").content"""), '"Tokens"')
        self.shot("narrow")

    def test_tiles_fill_their_rows(self):
        """No tile stands alone at any width."""
        for width in (1200, 1101, 1000, 900, 760, 600, 500, 400):
            self.browser.size(width, 800)
            tops = self.browser.run("return [...document.querySelectorAll('.tile')].map((e) => Math.round(e.getBoundingClientRect().top))")
            self.assertIn(sorted(tops.count(top) for top in set(tops)), ([6], [3, 3], [2, 2, 2]), width)

    def test_sessions_without_a_name_and_prefixes(self):
        """Who has no name is known by its id; hits, hit rates and what a prefix's part counts stand in a panel; links work."""
        with self.client.open("demo") as session:
            rows = np.random.default_rng(2).standard_normal((2, 64, 2, 64)).astype(np.float32)
            session.append_layers(1, rows, rows)
            session.publish(1, list(range(64)))
            for asked in (list(range(64)), list(range(32)), [7] * 32):
                session.match(None, asked)
            ids = [row["id"] for row in self.daemon.get("/v1/sessions")["sessions"] if not row["name"]]
            self.browser.run("round()")
            self.wait_text("#prefixes tbody", "64")
            self.assertIn(ids[0], self.text("#sessions tbody"))
            row = self.browser.run("return [...document.querySelectorAll('#prefixes tbody td')].map((e) => e.textContent)")
            self.assertEqual((row[1], row[3], row[5], row[6]), ("demo", "64", "2", "1"))
            row = self.browser.run("return [...document.querySelectorAll('#prefix_pools tbody td')].map((e) => e.textContent)")
            self.assertEqual((row[0], row[3], row[4], row[5]), ("demo", "3", "67 %", "96"))
            self.shot("prefixes")
            for link in self.browser.run("return [...document.querySelectorAll('footer a')].map((e) => e.href)"):
                self.assertEqual(self.daemon.request("GET", link.removeprefix(f"http://{self.daemon.http}"), raw=True)[0], 200, link)
            control = tqkv.http.Control(self.daemon.http)
            self.daemon.request("DELETE", "/v1/prefixes/" + control.prefixes()[0]["id"])

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

    def test_states_of_blocks(self):
        """Cached, shared, pinned, reserved and exact blocks in the map, and the tier; what they mean stands below."""
        with Daemon("--backend", "cpu", "--pool", STATES, "--host-tier-bytes", "4MiB") as daemon, \
                tqkv.Client(daemon.addr) as client, client.open("states", "reader", reserve_blocks=10) as session:
            rows = np.random.default_rng(1).standard_normal((2, 64, 2, 64)).astype(np.float32)
            with client.open("states", "gone") as gone:
                gone.append_layers(1, rows[:, :48], rows[:, :48])
                gone.publish(1, list(range(48)))
            session.append_layers(1, rows, rows)
            session.fork({2: 1})
            session.append_layers(3, rows[:, :16], rows[:, :16])
            session.spill(3)
            session.append_layers(4, rows[:, :20], rows[:, :20])
            session.pin(4)
            control = tqkv.http.Control(daemon.http)
            control.set_tenant(str(os.getuid()), sessions=9, bytes=1 << 20, weight=3)
            control.set_tenant("1000000001", tokens=5)
            deadline = time.monotonic() + 60
            while daemon.get("/v1/occupancy")["tiers"]["n_spilled_sequences"] == 0:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)
            self.browser.open(f"http://{daemon.http}/")
            self.wait_text("#health .text", "ready")
            self.wait_text("#tiers", "1 sequence")
            occupancy = daemon.get("/v1/occupancy")["pools"][0]
            blocks, ring = occupancy["groups"][0]["blocks"], occupancy["exact_window"]["blocks"]
            labels = self.browser.run(
                "return [...document.querySelectorAll('.map')].map((map) => map.getAttribute('aria-label'))")
            self.assertEqual(labels, [
                f"states: {blocks['shared']} shared, 2 pinned, 3 cached, {blocks['reserved']} reserved, {blocks['free']} free of 64 blocks",
                f"states, exact window: {ring['owned'] + ring['pinned']} exact, {ring['free']} free of {ring['total']} blocks"])
            for state in ("shared", "pinned", "cached", "reserved", "exact"):
                self.assertIn(f"{state}:", self.text("#legend"))
            for _ in range(3):
                session.decode_batch({n: np.ones((4, 64), np.float32) for n in (1, 2, 4)}, 0)
                self.browser.run("round()")
                time.sleep(0.05)
            self.wait_text("#tenants tbody", "1 of 9")
            self.shot("states")
            self.browser.dark(True)
            self.browser.wait("return getComputedStyle(document.querySelector('.map .free')).backgroundColor === 'rgb(51, 51, 47)'")
            self.browser.run("round()")
            time.sleep(0.1)
            self.shot("states_dark")
            self.browser.size(400, 800)
            self.assertTrue(self.browser.run("return document.scrollingElement.scrollWidth <= innerWidth"))
            self.shot("states_narrow")

    def test_login(self):
        """A form until a token is right; a wrong one is one failed login, and not asked with again."""
        folder = tempfile.mkdtemp(prefix="tqkv-test.")
        self.addCleanup(shutil.rmtree, folder, True)
        pathlib.Path(folder, "tokens").write_text(f"read viewer {READ}\nadmin ops {ADMIN}\n")
        with Daemon("--backend", "cpu", "--pool", DEMO, "--tokens-file", f"{folder}/tokens", token=ADMIN) as daemon:
            self.browser.open(f"http://{daemon.http}/")
            self.wait_text("#health .text", "no access")
            self.browser.wait("return !document.querySelector('#login').hidden")
            self.assertEqual(self.browser.run("return document.querySelector('#content').offsetHeight"), 0)
            self.assertEqual(self.focused(), "token")
            self.assertEqual(self.text("#login_error"), "")
            self.shot("login")
            self.browser.press(*"wrong-token-0123456789", ENTER)
            self.wait_text("#login_error", "not known")
            for _ in range(5):
                self.browser.run("document.dispatchEvent(new Event('visibilitychange'))")
            failed = daemon.metrics()['tqkv_http_logins_refused_total{reason="token"}']
            self.assertEqual(failed, 1)
            self.browser.press(*READ, ENTER)
            self.wait_text("#health .text", "ready")
            self.assertTrue(self.browser.run("return document.querySelector('#login').hidden"))
            self.assertIn("0 of 64", self.text("#tiles"))
            self.assertNotIn(READ, self.browser.run("return document.documentElement.outerHTML + location.href"))
            # The token is taken away while the page is open: it says so, and asks again.
            pathlib.Path(folder, "tokens").write_text(f"admin ops {ADMIN}\n")
            self.assertEqual(daemon.request("POST", "/v1/reload", {})[0], 200)
            self.browser.run("round()")
            self.wait_text("#login_error", "not known")
            self.assertIsNone(self.browser.run("return sessionStorage.getItem('tqkv_token')"))
            self.browser.console()  # refusals stand there

    def test_a_daemon_that_drains(self):
        """Health is what /readyz says: a daemon that was told to stop says so while its sessions go on."""
        with Daemon("--backend", "cpu", "--pool", DEMO, "--drain-timeout-ms", "60000") as daemon, tqkv.Client(daemon.addr) as client, \
                client.open("demo", "last"):
            self.browser.open(f"http://{daemon.http}/")
            self.wait_text("#health .text", "ready")
            self.assertEqual(self.browser.run("return document.querySelector('#health').dataset.state"), "ready")
            self.assertEqual(daemon.request("POST", "/v1/drain", {})[0], 202)
            self.browser.run("round()")
            self.wait_text("#health .text", "draining")
            self.assertEqual(self.browser.run("return document.querySelector('#health').dataset.state"), "draining")
        self.browser.console()  # /readyz answers 503

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
