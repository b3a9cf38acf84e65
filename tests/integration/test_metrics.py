"""/metrics of a real daemon: what promtool says of it, that nothing appears later, that the sums hold."""

import os
import re
import shutil
import struct
import subprocess
import unittest

import frames
from daemon import EXACT, Daemon

ROW = struct.pack("<64f", *[0.5] * 64)


class Scrapes(unittest.TestCase):
    def setUp(self):
        self.daemon = Daemon("--backend", "cpu", "--pool", EXACT)
        self.addCleanup(self.daemon.__exit__, None)

    def work(self, raw):
        """Items that succeed and items that do not; a refused frame; a refused connection."""
        session = raw.open(b"exact")
        row = ROW * 2
        self.assertEqual(raw.call(frames.rows(frames.APPEND, session, [(1, 0, 1, 0, 1)], n_layers=2, k=row, v=row))
                         .item_statuses(), [0])
        refused = raw.call(frames.rows(frames.APPEND, session, [(1, 7, 1, 0, 0), (2, 0, 1, 0, 0)], n_layers=2, k=row * 2,
                                       v=row * 2)).item_statuses()
        self.assertEqual(refused, [308, 300])
        self.assertEqual(raw.call(frames.open_session(b"none")).status, 300)
        q = struct.pack("<128f", *[0.1] * 128)
        raw.call(frames.rows(frames.DECODE, session, [(1, 1, 0, 1, 0)], q=q))
        return session

    def test_every_series_is_there_from_the_first_scrape(self):
        # Series of a tenant begin when it is known: by its first session, or by a policy.
        self.assertEqual(self.daemon.request("PUT", f"/v1/tenants/{os.getuid()}", {"weight": 1})[0], 200)
        before = set(self.daemon.metrics())
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            self.work(raw)
            after = set(self.daemon.metrics())
        self.assertEqual(after - before, set())
        self.assertEqual(before - after, set())

    def test_rejections_are_the_refused_items_and_frames(self):
        """FAILURES P10: by reason, each refused item and each refused frame exactly once."""
        def rejected():
            return {name: value for name, value in self.daemon.metrics().items() if "rejected_total" in name}

        before = rejected()
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            self.work(raw)
        after = rejected()
        changed = {re.search('"(.*)"', name).group(1): after[name] - before[name] for name in after
                   if after[name] != before[name]}
        self.assertEqual(changed, {"POSITION": 1, "NOT_FOUND": 2})

    def test_block_states_add_up(self):
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"exact", reserve_blocks=5)
            for position in range(0, 200, 20):
                raw.call(frames.rows(frames.APPEND, session, [(1, position, 20, 0, int(position == 0))], n_layers=2,
                                     k=ROW * 40, v=ROW * 40))
                rows = self.daemon.metrics()
                states = [value for name, value in rows.items() if name.startswith("tqkv_blocks{")]
                self.assertEqual(sum(states), 64)

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed")
    def test_promtool_has_nothing_to_say(self):
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            self.work(raw)
            text = self.daemon.get("/metrics")
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))


if __name__ == "__main__":
    unittest.main()
