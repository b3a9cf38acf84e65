"""The files of deploy/ as their own checkers see them: compose, systemd, promtool, and what the rules of this project ask."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import yaml

ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
BUILD = pathlib.Path(os.environ["TQKV_BUILD"])
SCRATCH = pathlib.Path(os.environ["TQKV_SCRATCH"])
DEPLOY = ROOT / "deploy"
# systemd-analyze security: 0 is a service that may do nothing, 10 one that may do anything.
EXPOSURE_MAX = 2.0
PROFILES = ("cpu", "gpu")


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, **options)


class Compose(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.text = (DEPLOY / "compose.yaml").read_text()
        cls.top = yaml.safe_load(cls.text)
        cls.services = cls.top["services"]

    def of_profile(self, profile):
        return {name: one for name, one in self.services.items() if profile in one["profiles"]}

    def test_loads(self):
        """Compose accepts each profile, with defaults and with every variable set; 1.29 takes no top-level name."""
        if shutil.which("docker-compose"):
            compose = ["docker-compose"]
        elif run("docker", "compose", "version").returncode == 0:
            compose = ["docker", "compose"]
        else:
            self.skipTest("neither docker-compose nor docker compose is installed")
        self.assertNotIn("name", self.top)
        self.assertNotIn("version", self.top)
        numbers = {name: "1024" for name in re.findall(r"\$\{(\w+):-\d+\}", self.text)}
        self.assertIn("TQKV_NOFILE", numbers)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE", "DOCKER", "TQKV"))}
        for profile in PROFILES:
            for extra in ({}, numbers):
                done = run(*compose, "--profile", profile, "config", cwd=DEPLOY, env=dict(env, **extra))
                self.assertEqual(done.returncode, 0, done.stderr)
                config = yaml.safe_load(done.stdout)
                self.assertEqual(set(self.of_profile(profile)) - set(config["services"]), set())

    def test_the_tls_proxy_of_the_threats_loads(self):
        """The override file that THREATS.md shows fits beside compose.yaml, and adds its proxy to both profiles."""
        found = re.search(r"```yaml\n(.*?)```", (DEPLOY / "THREATS.md").read_text(), re.S)
        self.assertTrue(found)
        compose = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        if run(*compose, "version").returncode != 0:
            self.skipTest("neither docker-compose nor docker compose is installed")
        with tempfile.TemporaryDirectory() as folder:
            override = pathlib.Path(folder, "tls.yaml")
            override.write_text(found.group(1))
            for profile in PROFILES:
                done = run(*compose, "-f", DEPLOY / "compose.yaml", "-f", override, "--profile", profile, "config", cwd=DEPLOY)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("tls", yaml.safe_load(done.stdout)["services"])

    def test_the_configuration_file_of_the_readme_is_taken(self):
        """The override that README.md shows leaves the lists to the file that it shows, and the daemon takes that file."""
        readme = (DEPLOY / "README.md").read_text()
        override = re.search(r"```yaml\n(.*?)```", readme, re.S).group(1)
        config = re.search(r"```json\n(.*?)```", readme, re.S).group(1)
        self.assertEqual(set(yaml.safe_load(override)["services"]), {"tqkvd"})
        self.assertEqual(set(json.loads(config)), {"listen", "tenants", "pools"})
        compose = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "override.yaml").write_text(override)
            pathlib.Path(folder, "tqkvd.json").write_text(config)
            pathlib.Path(folder, "tokens").write_text("data worker 0123456789abcdef tenant=7\n")
            done = run(BUILD / "server/tqkvd", "--check-config", "--config", pathlib.Path(folder, "tqkvd.json"), "--memory", "1GiB",
                       "--tokens-file", pathlib.Path(folder, "tokens"))
            self.assertEqual(done.returncode, 0, done.stderr)
            if run(*compose, "version").returncode != 0:
                self.skipTest("neither docker-compose nor docker compose is installed")
            done = run(*compose, "-f", DEPLOY / "compose.yaml", "-f", pathlib.Path(folder, "override.yaml"), "--profile", "cpu",
                       "config", cwd=DEPLOY)
            self.assertEqual(done.returncode, 0, done.stderr)
            service = yaml.safe_load(done.stdout)["services"]["tqkvd"]
            self.assertEqual(service["command"], ["--config=/etc/tqkv/tqkvd.json"])
            self.assertIn("/etc/tqkv/tqkvd.json", str(service["volumes"]))
            self.assertIn("/var/lib/tqkv", str(service["volumes"]))

    def test_every_service_is_confined(self):
        for name, service in self.services.items():
            self.assertEqual(service["cap_drop"], ["ALL"], name)
            self.assertNotIn("cap_add", service, name)
            self.assertNotIn("privileged", service, name)
            self.assertIs(service["read_only"], True, name)
            self.assertIn("no-new-privileges:true", service["security_opt"], name)
            for port in service.get("ports", []):
                self.assertRegex(port, r"^(127\.0\.0\.1|\$\{TQKV_PUBLISH:-127\.0\.0\.1\}):", name)
            for volume in service.get("volumes", []):
                source, _, rest = volume.partition(":")
                if source.startswith("."):
                    self.assertTrue((DEPLOY / source).is_dir(), volume)
                    self.assertTrue(rest.endswith(":ro"), volume)
                else:
                    self.assertIn(source, self.top["volumes"])
        for name in ("tqkvd", "tqkvd-gpu"):
            self.assertEqual(self.services[name]["secrets"], ["tokens"])
            self.assertNotIn("TQKV_INSECURE", self.services[name]["environment"])
            self.assertIn("seccomp=${TQKV_SECCOMP:-./seccomp-io_uring.json}", self.services[name]["security_opt"])

    def test_profiles_are_complete(self):
        """Each profile has one daemon reachable as tqkvd, a demo that waits for its health, Prometheus, Grafana."""
        for profile, daemon, demo in (("cpu", "tqkvd", "demo"), ("gpu", "tqkvd-gpu", "demo-gpu")):
            self.assertEqual(set(self.of_profile(profile)), {daemon, demo, "prometheus", "grafana"})
            self.assertEqual(self.services[demo]["depends_on"], {daemon: {"condition": "service_healthy"}})
            self.assertEqual(self.services[daemon]["hostname"], "tqkvd")
            self.assertEqual(self.services[daemon]["environment"]["TQKV_HTTP_NAME"], "tqkvd")
        self.assertEqual(self.services["tqkvd-gpu"]["networks"]["default"]["aliases"], ["tqkvd"])
        self.assertEqual(self.services["tqkvd-gpu"]["deploy"]["resources"]["reservations"]["devices"],
                         [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}])
        self.assertNotIn("deploy", self.services["tqkvd"])

    def test_grace_is_longer_than_the_drain(self):
        default_ms = int(re.search(r"drain_timeout_ms, (\d+)", (ROOT / "server/options.h").read_text()).group(1))
        for name in ("tqkvd", "tqkvd-gpu"):
            self.assertGreater(int(self.services[name]["stop_grace_period"].rstrip("s")) * 1000, default_ms)
        stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", (DEPLOY / "tqkvd.service").read_text(), re.M).group(1))
        self.assertGreater(stop_s * 1000, default_ms)

    def test_readme_names_every_variable(self):
        readme = (DEPLOY / "README.md").read_text()
        for name in sorted(set(re.findall(r"\$\{(\w+):-", self.text))):
            self.assertIn(f"`{name}`", readme)


class Unit(unittest.TestCase):
    """The unit as meson installs it: its ExecStart is the installed program."""

    @classmethod
    def setUpClass(cls):
        if not shutil.which("systemd-analyze"):
            raise unittest.SkipTest("systemd-analyze is not installed")
        cls.folder = SCRATCH / "unit"
        cls.folder.mkdir()
        cls.unit = cls.folder / "tqkvd.service"
        cls.text = (DEPLOY / "tqkvd.service").read_text()
        cls.unit.write_text(cls.text.replace("/usr/bin/tqkvd", str(BUILD / "server/tqkvd")))

    def test_verify(self):
        done = run("systemd-analyze", "verify", "--man=no", self.unit)
        ours = [line for line in (done.stdout + done.stderr).splitlines() if "tqkvd" in line]
        self.assertEqual((done.returncode, ours), (0, []), done.stderr)

    def test_security(self):
        done = run("systemd-analyze", "security", "--offline=true", "--no-pager", self.unit)
        found = re.search(r"Overall exposure level for tqkvd.service: (\d+\.\d+)", done.stdout)
        self.assertTrue(found, done.stdout + done.stderr)
        self.assertLessEqual(float(found.group(1)), EXPOSURE_MAX, done.stdout)
        bound = run("systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={EXPOSURE_MAX * 10:.0f}",
                    self.unit)
        self.assertEqual(bound.returncode, 0)

    def test_says_what_it_must(self):
        for line in ("Type=notify", "WatchdogSec=30", "ExecReload=/bin/kill -HUP $MAINPID", "DevicePolicy=closed",
                     "DeviceAllow=char-nvidia* rw", "RestartPreventExitStatus=2"):
            self.assertIn(f"\n{line}\n", self.text)
        self.assertRegex(self.text, r"\nLoadCredential=tokens:")


class Monitoring(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not shutil.which("promtool"):
            raise unittest.SkipTest("promtool is not installed (Debian: prometheus)")

    def test_prometheus_configuration(self):
        done = run("promtool", "check", "config", DEPLOY / "prometheus/prometheus.yaml")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_alert_rules(self):
        done = run("promtool", "test", "rules", DEPLOY / "prometheus/alerts_test.yaml")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_rule_is_tested(self):
        """Named where it must fire; and a rule that never fires is noticed: each is made false once, and the test fails."""
        rules = (DEPLOY / "prometheus/alerts.yaml").read_text()
        tests = (DEPLOY / "prometheus/alerts_test.yaml").read_text()
        for rule in yaml.safe_load(rules)["groups"][0]["rules"]:
            self.assertIn(rule["alert"], tests)
            self.assertIn("severity", rule["labels"])
            self.assertEqual(set(rule["annotations"]), {"summary", "description"})
        folder = SCRATCH / "rules"
        folder.mkdir()
        # Without the first part: a rule that is false sets nothing off, and its twenty minutes take long.
        fewer = dict(yaml.safe_load(tests))
        fewer["tests"] = fewer["tests"][1:]
        (folder / "alerts_test.yaml").write_text(yaml.safe_dump(fewer))
        groups = yaml.safe_load(rules)
        for rule in groups["groups"][0]["rules"]:
            kept = rule["expr"]
            rule["expr"] = f"({kept}) and vector(1) == 0"
            (folder / "alerts.yaml").write_text(yaml.safe_dump(groups))
            rule["expr"] = kept
            self.assertNotEqual(run("promtool", "test", "rules", folder / "alerts_test.yaml").returncode, 0, rule["alert"])

    def test_grafana_finds_its_files(self):
        """Data source and dashboard provider name what compose mounts and what the dashboard's panels use."""
        source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
        provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/tqkv.yaml").read_text())["providers"][0]
        mounted = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]["volumes"]
        self.assertIn(f"./grafana/dashboards:{provider['options']['path']}:ro", mounted)
        self.assertEqual(source["url"], "http://prometheus:9090")
        dashboard = json.loads((DEPLOY / "grafana/dashboards/tqkv.json").read_text())
        for panel in dashboard["panels"]:
            for part in ([panel] if panel["type"] != "row" else []) + panel.get("targets", []):
                self.assertEqual(part["datasource"], {"type": "prometheus", "uid": source["uid"]}, panel["title"])
        places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
        for i, (left, top, width, height) in enumerate((p["gridPos"][k] for k in "xywh") for p in dashboard["panels"]):
            self.assertLessEqual(left + width, 24)
            for other in dashboard["panels"][:i]:
                x, y, w, h = (other["gridPos"][k] for k in "xywh")
                self.assertTrue(left + width <= x or x + w <= left or top + height <= y or y + h <= top,
                                f"{dashboard['panels'][i]['title']} lies over {other['title']}")
        self.assertEqual(len(set(places)), len(places))


class MakeTokens(unittest.TestCase):
    def test_help_and_folders(self):
        """--help is its own; an empty folder is as good as none, and one with something in it is left as it is."""
        done = run("bash", DEPLOY / "make-tokens", "--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("deploy/make-tokens [FOLDER]", done.stdout)
        self.assertEqual(run("bash", DEPLOY / "make-tokens", "--unknown").returncode, 2)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
            self.assertEqual(run("bash", DEPLOY / "make-tokens", folder).returncode, 0)
            made = {name: pathlib.Path(folder, name).read_text() for name in sorted(os.listdir(folder))}
            self.assertEqual(list(made), ["admin", "data", "read", "tokens"])
            self.assertEqual(os.stat(folder).st_mode & 0o777, 0o700)
            done = run("bash", DEPLOY / "make-tokens", folder)
            self.assertEqual(done.returncode, 1)
            self.assertIn("not empty", done.stderr)
            self.assertEqual({name: pathlib.Path(folder, name).read_text() for name in made}, made)


class Changelog(unittest.TestCase):
    def test_says_what_is_stable(self):
        text = (DEPLOY / "CHANGELOG.md").read_text()
        for word in ("wire", "formats", "snapshots", "metrics", "flags"):
            self.assertRegex(text, rf"(?im)^\|\s*{word}\b")
        version = re.search(r"version: '([\d.]+)'", (ROOT / "meson.build").read_text()).group(1)
        self.assertIn(f"## {version}", text)
