"""Debian's Prometheus with the shipped configuration scrapes a daemon under load; every query of the dashboard has an answer."""

import json
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time
import unittest
import urllib.parse
import urllib.request

from daemon import CAPTURE, DEMO, Daemon

ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
SCRATCH = pathlib.Path(os.environ["TQKV_SCRATCH"])
DEPLOY = ROOT / "deploy"
PATIENCE_S = 60
N_SCRAPES = 5


class Prometheus:
    def __init__(self, folder, target):
        shutil.copytree(DEPLOY / "prometheus", folder)
        path = folder / "prometheus.yaml"
        text = path.read_text().replace("tqkvd:7872", target).replace("scrape_interval: 5s", "scrape_interval: 1s")
        path.write_text(text.replace("evaluation_interval: 5s", "evaluation_interval: 1s"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={self.address}"], stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)

    def get(self, path, **parameters):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as reply:
            return json.load(reply)["data"]

    def query(self, text):
        return self.get("query", query=text)["result"]

    def stop(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


class Scraped(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not shutil.which("prometheus"):
            raise unittest.SkipTest("prometheus is not installed (Debian: prometheus)")
        cls.daemon = Daemon("--backend", "cpu", "--pool", DEMO)
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.prometheus = Prometheus(SCRATCH / "prometheus", cls.daemon.http)
        cls.addClassCleanup(cls.prometheus.stop)
        cls.is_over = threading.Event()
        cls.load = threading.Thread(target=cls.replay_until_over)
        cls.load.start()
        cls.addClassCleanup(cls.load.join)
        cls.addClassCleanup(cls.is_over.set)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                scraped = cls.prometheus.query("count_over_time(tqkv_rows_in_total[10m])")
                if scraped and float(scraped[0]["value"][1]) >= N_SCRAPES:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError("Prometheus did not scrape:\n" + (SCRATCH / "prometheus/log").read_text()[-3000:])

    @classmethod
    def replay_until_over(cls):
        while not cls.is_over.is_set():
            cls.daemon.ctl("replay", CAPTURE, check=False)

    def test_target_is_up(self):
        targets = self.prometheus.get("targets")["activeTargets"]
        self.assertEqual([(one["health"], one["lastError"]) for one in targets], [("up", "")])

    def test_rules_are_evaluated(self):
        """Every expression of a rule means something to Prometheus, and a daemon under load sets no alarm off."""
        rules = [rule for group in self.prometheus.get("rules")["groups"] for rule in group["rules"]]
        self.assertGreater(len(rules), 10)
        for rule in rules:
            self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""), rule["name"])
            if rule["name"] != "TqkvWithoutIoUring":
                self.assertNotEqual(rule["state"], "firing", rule)

    def test_every_query_of_the_dashboard_has_an_answer(self):
        """As Grafana would ask it: variables filled in, series come back, and their values are numbers."""
        dashboard = json.loads((DEPLOY / "grafana/dashboards/tqkv.json").read_text())
        variables = {"$__rate_interval": "1m", "$instance": ".*", "$pool": ".*"}
        n_queries = 0
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                text = target["expr"]
                for name, value in variables.items():
                    text = text.replace(name, value)
                self.assertNotIn("$", text)
                with self.subTest(panel=panel["title"], query=text):
                    series = self.prometheus.query(text)
                    self.assertTrue(series, "no series")
                    self.assertTrue(all(math.isfinite(float(one["value"][1])) for one in series), series)
                    n_queries += 1
        self.assertGreater(n_queries, 30)
        for variable in dashboard["templating"]["list"]:
            metric, label = variable["query"][len("label_values("):-1].split(", ")
            values = self.prometheus.get(f"label/{label}/values", **{"match[]": metric})
            self.assertTrue(values, variable["query"])
        for annotation in dashboard["annotations"]["list"]:
            self.prometheus.query(annotation["expr"].replace("$instance", ".*"))

    def test_rules_and_dashboard_use_series_that_exist(self):
        """An alert on a series that is never made never fires: each name is one that the daemon exposes."""
        exposed = {line.split()[2] for line in self.daemon.get("/metrics").splitlines() if line.startswith("# TYPE")}
        for path in ("prometheus/alerts.yaml", "grafana/dashboards/tqkv.json"):
            for name in set(re.findall(r"\btqkv_\w+", (DEPLOY / path).read_text())):
                self.assertIn(re.sub(r"_(bucket|sum|count)$", "", name), exposed, path)
