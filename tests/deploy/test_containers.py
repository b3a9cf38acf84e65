"""Images and compose, run for real by a private engine. The tests build on each other and run in the order of their names."""

import datetime
import json
import os
import pathlib
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
import unittest
import urllib.error
import urllib.request

import engine as engines
import frames

ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
BUILD = pathlib.Path(os.environ["TQKV_BUILD"])
DEPLOY = ROOT / "deploy"
CAPTURE = next((ROOT / "tests/golden/captures").glob("*.safetensors"))
COMMIT = "0123456789ab"
PATIENCE_S = 90
# What stands in for an image that only a registry has. The real one is Debian's program under the same name.
PROMETHEUS = """FROM debian:bookworm-slim
COPY prometheus /usr/bin/
RUN mkdir -m 0777 /prometheus
USER 65534:65534
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
"""

# A machine with systemd as process 1, with the programs and files as meson and deploy/README.md put them. Credentials are
# mounted, and seen by the service only where mounts are shared, as systemd makes them outside of containers.
SYSTEMD = """FROM tqkv-demo:test
USER 0:0
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd procps >/dev/null
COPY tqkvd.service /lib/systemd/system/
COPY tqkv.sysusers /usr/lib/sysusers.d/tqkv.conf
COPY short-watchdog.conf /etc/systemd/system/tqkvd.service.d/
RUN mkdir -m 0755 /etc/tqkv && systemctl enable tqkvd && systemctl set-default multi-user.target
COPY tqkvd.json /etc/tqkv/
COPY --chmod=0600 tokens /etc/tqkv/
COPY --chmod=0600 admin /root/
STOPSIGNAL SIGRTMIN+3
HEALTHCHECK NONE
ENTRYPOINT ["/bin/sh", "-c", "mount --make-rshared / && exec /lib/systemd/systemd"]
"""


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def base_image():
    return re.search(r"^ARG BASE=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.M).group(1)


def when(text):
    """Nanoseconds are cut: datetime has microseconds."""
    return datetime.datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", text).replace("Z", "+00:00"))


def wait_for(what, question, patience_s=PATIENCE_S):
    """Asks until the answer is true and returns it."""
    end = time.monotonic() + patience_s
    answer = None
    while time.monotonic() < end:
        try:
            answer = question()
        except (OSError, AssertionError, ValueError) as error:
            answer = None
            failure = error
        else:
            failure = None
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"{what}: not within {patience_s} s ({failure})")


def host_has_io_uring():
    """As the integration tests find out: the daemon says at start what it got."""
    done = subprocess.run([BUILD / "server/tqkvd", "--io", "io_uring", "--listen", "unix:/proc/denied/x", "--http", "off"],
                          capture_output=True, text=True, timeout=60)
    return not re.search("io_uring.*(ENOSYS|EPERM|ENOMEM)", done.stdout + done.stderr)


class Containers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        reason = engines.why_not()
        if reason:
            raise unittest.SkipTest(f"NO CONTAINER WAS RUN: {reason}")
        cls.engine = engine = engines.Engine(pathlib.Path(os.environ["TQKV_SCRATCH"]) / "engine")
        cls.addClassCleanup(cls.stop_engine)
        engine.wait()
        engines.make_base_image(engine, base_image())
        # The network of this machine: the engine has none of its own, and packages come from a mirror.
        for target in ("cpu", "demo"):
            engine.docker("build", "--network=host", "--file", DEPLOY / "Dockerfile", "--target", target, "--build-arg",
                          f"COMMIT={COMMIT}", "--tag", f"tqkv-{target}:test", ROOT, timeout=540)
        cls.secrets = pathlib.Path(os.environ["TQKV_SCRATCH"]) / "secrets"
        engine.run("bash", DEPLOY / "make-tokens", cls.secrets)
        cls.data_port, cls.http_port, cls.prometheus_port, cls.grafana_port = free_ports(4)
        engine.env.update(TQKV_SECRETS=str(cls.secrets), TQKV_IMAGE="tqkv-cpu:test", TQKV_DEMO_IMAGE="tqkv-demo:test", TQKV_MEMORY="256MiB",
                          TQKV_DEMO_PAUSE_S="0", TQKV_DATA_PORT=str(cls.data_port), TQKV_HTTP_PORT=str(cls.http_port),
                          TQKV_PROMETHEUS_PORT=str(cls.prometheus_port), TQKV_GRAFANA_PORT=str(cls.grafana_port))

    @classmethod
    def stop_engine(cls):
        left = cls.engine.stop()
        assert not left, "the engine left behind:\n" + "\n".join(left)

    # ---- what the tests ask ----

    def compose(self, *arguments, profile="cpu", **options):
        return self.engine.run(*self.engine.compose_command, "--profile", profile, *arguments, cwd=DEPLOY, **options)

    def container(self, service):
        """Everything about a service's container; compose 1.29 and 2 join the parts of its name differently."""
        ids = self.compose("ps", "--quiet", service).stdout.split()
        self.assertEqual(len(ids), 1, f"{service}: {ids}")
        return self.engine.inspect(ids[0])

    def health(self):
        return self.container("tqkvd")["State"]["Health"]["Status"]

    def logs(self, service):
        return self.compose("logs", "--no-color", service).stdout

    def http(self, path, port=None, role="read", method="GET"):
        request = urllib.request.Request(f"http://127.0.0.1:{port or self.http_port}{path}", method=method)
        if role and not port:
            request.add_header("Authorization", f"Bearer {self.token(role)}")
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.read().decode()

    def token(self, role):
        return (self.secrets / role).read_text().strip()

    def ctl(self, *arguments, role="admin"):
        """tqkvctl from this machine, through the published ports."""
        return [BUILD / "server/tqkvctl", "--addr", f"tcp:127.0.0.1:{self.data_port}", "--http",
                f"127.0.0.1:{self.http_port}", *(["--token-file", self.secrets / role] if role else []), *arguments]

    def metrics(self):
        lines = [line for line in self.http("/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def n_replays(self):
        return len(re.findall(r"demo: replay \d+ is right", self.logs("demo")))

    def replay(self):
        done = subprocess.run(self.ctl("replay", CAPTURE), capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("accounts add up", done.stdout)

    def boot_id(self):
        return json.loads(self.http("/v1/info"))["boot_id"]

    def up(self, *services, **options):
        self.compose("up", "--detach", "--no-build", *services, **options)

    # ---- images ----

    def test_1_image(self):
        """The image says which commit it is, runs as nobody in particular, and holds no compiler and no interpreter."""
        image = self.engine.inspect("tqkv-cpu:test")
        config = image["Config"]
        self.assertEqual(config["User"], "10001:10001")
        self.assertEqual(config["Entrypoint"], ["tqkvd"])
        self.assertEqual(config["StopSignal"], "SIGTERM")
        self.assertEqual(config["Healthcheck"]["Test"][:2], ["CMD", "tqkvctl"])
        self.assertEqual(config["Labels"]["org.opencontainers.image.revision"], COMMIT)
        base = self.engine.inspect(base_image())
        grown_bytes = image["Size"] - base["Size"]
        self.assertLess(grown_bytes, 32 << 20, "something that is not needed to run came along")
        run = ("run", "--rm", "--network=none", "--read-only")
        self.assertRegex(self.engine.docker(*run, "tqkv-cpu:test", "--version").stdout, f"commit {COMMIT}")
        script = "id -u; for p in cc gcc g++ clang make ninja meson python3 git curl wget; do command -v $p; done; " \
            "find / -xdev -perm /6000 -type f -newer /usr/bin/tqkvctl 2>/dev/null; true"
        self.assertEqual(self.engine.docker(*run, "--entrypoint=sh", "tqkv-cpu:test", "-c", script).stdout, "10001\n")

    # ---- compose ----

    def test_2_stack(self):
        """Everything of the profile comes up; the demo only once the daemon is healthy; Prometheus scrapes it."""
        stand_in = self.engine.folder / "prometheus"
        stand_in.mkdir()
        (stand_in / "Dockerfile").write_text(PROMETHEUS)
        shutil.copy2(shutil.which("prometheus"), stand_in / "prometheus")
        text = (DEPLOY / "compose.yaml").read_text()
        name = re.search(r"TQKV_PROMETHEUS_IMAGE:-([^}]+)", text).group(1)
        self.engine.docker("build", "--network=host", "--tag", name, stand_in)
        self.up("tqkvd", "demo", "prometheus")
        daemon, demo = self.container("tqkvd"), self.container("demo")
        self.assertEqual(daemon["State"]["Health"]["Status"], "healthy")
        first_healthy = min(when(probe["End"]) for probe in daemon["State"]["Health"]["Log"] if probe["ExitCode"] == 0)
        self.assertGreater(when(demo["State"]["StartedAt"]), first_healthy)
        wait_for("the demo's first replay", self.n_replays)
        self.assertNotIn("replay failed", self.logs("demo"))
        self.replay()
        metrics = self.metrics()
        self.assertGreater(metrics["tqkv_rows_in_total"], 0)
        self.assertEqual(metrics['tqkv_io_backend{name="io_uring"}'], float(host_has_io_uring()))
        up = "/api/v1/query?query=up%7Bjob%3D%22tqkvd%22%7D"
        wait_for("Prometheus' target", lambda: json.loads(self.http(up, self.prometheus_port))["data"]["result"][0]
                 ["value"][1] == "1" if '"value"' in self.http(up, self.prometheus_port) else None)
        rules = json.loads(self.http("/api/v1/rules", self.prometheus_port))["data"]["groups"]
        self.assertTrue(all(rule["health"] in ("ok", "unknown") for group in rules for rule in group["rules"]))

    def test_3_hardening(self):
        """What the kernel says about process 1 of the daemon's container."""
        container = self.container("tqkvd")
        inside = pathlib.Path("/proc") / str(container["State"]["Pid"])
        status = dict(line.split(":\t", 1) for line in (inside / "status").read_text().splitlines() if ":\t" in line)
        self.assertEqual(status["Name"], "tqkvd")
        self.assertEqual(set(status["Uid"].split()), {"10001"})
        self.assertEqual({status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")}, {"0" * 16})
        self.assertEqual((status["NoNewPrivs"], status["Seccomp"]), ("1", "2"))
        limits = (inside / "limits").read_text()
        self.assertRegex(limits, r"Max open files +17408 +17408")
        self.assertRegex(limits, r"Max locked memory +8388608 +8388608")
        script = "for f in / /usr/bin /etc /run /tmp /run/tqkv /var/lib/tqkv; do touch $f/x 2>/dev/null && echo $f; done; true"
        writable = self.engine.docker("exec", container["Id"], "sh", "-c", script).stdout.split()
        self.assertEqual(writable, ["/tmp", "/run/tqkv", "/var/lib/tqkv"])
        # A call that the profile denies, by a process that is not the daemon.
        denied = self.engine.docker("exec", container["Id"], "unshare", "--user", "true", check=False)
        self.assertIn("Operation not permitted", denied.stderr)
        for service in ("tqkvd", "prometheus"):
            for bindings in self.container(service)["NetworkSettings"]["Ports"].values():
                for binding in bindings or []:
                    self.assertEqual(binding["HostIp"], "127.0.0.1", service)
        self.assertEqual(self.engine.docker("exec", container["Id"], "stat", "-c", "%a", "/run/tqkv/tqkvd.sock").stdout,
                         "660\n")

    def test_3_tokens(self):
        """Nobody without a token, each role its part, on both published ports; new tokens by a reload; the log names no token."""
        for role, path, method, code in ((None, "/metrics", "GET", 401), ("data", "/metrics", "GET", 403),
                                         ("read", "/v1/pools/demo", "DELETE", 403), (None, "/readyz", "GET", 200),
                                         ("read", "/v1/config", "GET", 200)):
            try:
                self.http(path, role=role, method=method)
                got = 200
            except urllib.error.HTTPError as error:
                got = error.code
            self.assertEqual(got, code, (role, path, method))
        for role, is_let_in in ((None, False), ("read", False), ("data", True)):
            done = subprocess.run(self.ctl("ping", role=role), capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode == 0, is_let_in, (role, done.stderr))
        # Written in place: what is mounted is this very file.
        old, new = self.token("read"), "0123456789abcdef" * 2
        table = (self.secrets / "tokens").read_text()
        (self.secrets / "tokens").write_text(table.replace(old, new))
        self.compose("kill", "-s", "SIGHUP", "tqkvd")

        def is_refused():
            try:
                self.http("/v1/config")
            except urllib.error.HTTPError as error:
                return error.code == 401
            return False
        wait_for("the old token's end", is_refused)
        (self.secrets / "read").write_text(new)
        self.http("/v1/config")
        logs = self.logs("tqkvd")
        for role in ("data", "read", "admin"):
            self.assertNotIn(self.token(role), logs)
        self.assertNotIn(old, logs)

    def test_4_restarts_under_load(self):
        """A restart, and a crash that the engine restarts from: the old socket is no obstacle, the demo goes on."""
        failures, stop = [], threading.Event()

        def load():
            # Each may fail while the daemon is away; what counts is that it always ends by itself.
            while not stop.is_set():
                try:
                    subprocess.run(self.ctl("replay", CAPTURE), capture_output=True, timeout=120)
                except subprocess.TimeoutExpired as error:
                    failures.append(error)
                time.sleep(0.1)
        thread = threading.Thread(target=load)
        thread.start()
        try:
            ids = [self.boot_id()]
            self.compose("restart", "tqkvd")
            self.serves_again(ids)
            self.assertIn("drained", self.logs("tqkvd"))
            n_stops = self.logs("tqkvd").count("drained")
            os.kill(self.container("tqkvd")["State"]["Pid"], 9)
            wait_for("the engine's restart", lambda: self.container("tqkvd")["RestartCount"] == 1)
            self.serves_again(ids)
            self.assertEqual(self.logs("tqkvd").count("drained"), n_stops)
        finally:
            stop.set()
            thread.join()
        self.assertEqual(failures, [])

    def serves_again(self, boot_ids):
        """Healthy, under a boot id that was not there before, and the demo gets right answers."""
        wait_for("health after a restart", lambda: self.health() == "healthy")
        boot_ids.append(wait_for("an answer", self.boot_id))
        self.assertEqual(len(set(boot_ids)), len(boot_ids))
        n_replays = self.n_replays()
        wait_for("the demo's next replay", lambda: self.n_replays() > n_replays)

    def test_4_snapshot_over_a_restart(self):
        """A stop writes what named sessions hold into the volume, and the next start has it again."""
        self.compose("stop", "demo")
        raw = frames.Raw(f"tcp:127.0.0.1:{self.data_port}")
        self.addCleanup(raw.close)
        self.assertEqual(raw.call(frames.hello(token=self.token("data").encode())).status, 0)
        session = raw.open(b"demo", name=b"kept", lease_ms=3600000)
        row = struct.pack("<128f", *[0.25 * i - 16 for i in range(128)])
        self.assertEqual(raw.call(frames.rows(frames.APPEND, session, [(9, 0, 3, 0, 1)], k=row * 3, v=row * 3)).status, 0)

        # One sequence of three tokens: K and V rows of two heads, tq4 in 36 bytes each.
        stored_bytes = 3 * 2 * 2 * 36

        def held():
            sessions = json.loads(self.http("/v1/sessions"))["sessions"]
            return [(one["pool"], one["n_sequences"], one["memory"]["stored_bytes"]) for one in sessions]
        # The demo that was stopped left nothing, either.
        self.assertEqual(held(), [("demo", 1, stored_bytes)])
        boot_id = self.boot_id()
        self.compose("restart", "tqkvd")
        wait_for("health after a restart", lambda: self.health() == "healthy")
        self.assertNotEqual(self.boot_id(), boot_id)
        self.assertEqual(held(), [("demo", 1, stored_bytes)])
        self.compose("start", "demo")
        n_replays = self.n_replays()
        wait_for("the demo's next replay", lambda: self.n_replays() > n_replays)

    def test_5_drain_and_down(self):
        """SIGTERM under load ends the daemon with 0 after it answered; down -v leaves no container, volume or network."""
        ids = {service: self.container(service)["Id"] for service in ("tqkvd", "demo", "prometheus")}
        for service, one in ids.items():
            self.compose("stop", service)
            # One that the engine had to kill ends with 137.
            state = self.engine.inspect(one)["State"]
            self.assertEqual((state["ExitCode"], state["OOMKilled"]), (0, False), service)
        self.down()

    def down(self):
        self.compose("down", "--volumes")
        self.assertEqual(self.engine.docker("ps", "--all", "--quiet").stdout, "")
        self.assertEqual(self.engine.docker("network", "ls", "--quiet", "--filter", "type=custom").stdout, "")
        self.assertEqual(self.engine.docker("volume", "ls", "--quiet", "--filter", "name=tqkv").stdout, "")

    # ---- io_uring denied (M6) ----

    def denying(self, number):
        """The shipped profile, made to deny io_uring as podman's (ENOSYS 38) and Docker's (EPERM 1) own profiles do."""
        profile = json.loads((DEPLOY / "seccomp-io_uring.json").read_text())
        names = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
        profile["syscalls"].append({"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": number})
        path = self.engine.folder / f"denied-{number}.json"
        path.write_text(json.dumps(profile))
        return path

    def test_6_io_uring_denied(self):
        """The epoll loop serves, the metric says so, and one log line names the profile file that would admit io_uring."""
        self.engine.env["TQKV_SECCOMP"] = str(self.denying(1))
        try:
            self.up("tqkvd", "demo")
            metrics = self.metrics()
            self.assertEqual((metrics['tqkv_io_backend{name="epoll"}'], metrics['tqkv_io_backend{name="io_uring"}']), (1, 0))
            lines = [line for line in self.logs("tqkvd").splitlines() if "seccomp-io_uring.json" in line]
            self.assertTrue(any("using epoll" in line and "EPERM" in line for line in lines), lines)
            self.assertEqual(sum("using epoll" in line for line in lines), 1)
            self.replay()
            wait_for("the demo's first replay", self.n_replays)
            self.down()
        finally:
            del self.engine.env["TQKV_SECCOMP"]
        run = ("run", "--rm", "--network=none", "--read-only", "--entrypoint=sh")
        script = "tqkvd --memory 64MiB --listen unix:/run/tqkv/s & sleep 1; tqkvctl ready; kill $!; wait $!; echo ended with $?"
        done = self.engine.docker(*run, f"--security-opt=seccomp={self.denying(38)}", "tqkv-cpu:test", "-c", script)
        self.assertRegex(done.stderr, r"using epoll: .*ENOSYS.*seccomp-io_uring\.json")
        self.assertEqual(done.stdout, "ready\nended with 0\n")
        # Asked for, and denied: the daemon says so and does not start (exit code 3).
        done = self.engine.docker("run", "--rm", "--network=none", f"--security-opt=seccomp={self.denying(1)}",
                                  "tqkv-cpu:test", "--io", "io_uring", "--memory", "64MiB", check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("seccomp-io_uring.json", done.stderr)

    # ---- the gpu profile on a host without NVIDIA's toolkit (M7) ----

    def test_7_gpu_profile_without_the_toolkit(self):
        """What the engine says then is what README.md quotes, word for word."""
        self.engine.docker("tag", "tqkv-cpu:test", "tqkv-gpu:test")
        done = self.compose("up", "--detach", "--no-build", "tqkvd-gpu", profile="gpu", check=False,
                            env={"TQKV_GPU_IMAGE": "tqkv-gpu:test"})
        self.assertNotEqual(done.returncode, 0)
        said = re.search(r'could not select device driver "nvidia" with capabilities: \[\[gpu\]\]', done.stdout + done.stderr)
        self.assertTrue(said, done.stdout + done.stderr)
        self.assertIn(said.group(0), (DEPLOY / "README.md").read_text())
        self.compose("down", "--volumes", profile="gpu")

    # ---- systemd ----

    def test_8_systemd(self):
        """systemd starts the unit as it is shipped: confined, with io_uring, restarted by its watchdog, drained at the end."""
        folder = self.engine.folder / "systemd"
        folder.mkdir()
        (folder / "Dockerfile").write_text(SYSTEMD)
        for name in ("tqkvd.service", "tqkv.sysusers"):
            shutil.copy(DEPLOY / name, folder)
        (folder / "short-watchdog.conf").write_text("[Service]\nWatchdogSec=2\n")
        (folder / "tqkvd.json").write_text('{"memory": "64MiB", "tokens_file": "credential:tokens"}\n')
        for name in ("tokens", "admin"):
            shutil.copy(self.secrets / name, folder)
        self.engine.docker("build", "--network=host", "--tag", "tqkv-systemd", folder)
        # What systemd needs to be process 1, without the rights that not every machine has to give.
        self.engine.docker("run", "--detach", "--name=machine", "--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined",
                           "--security-opt=apparmor=unconfined", "--cgroupns=host", "--network=none", "--tmpfs=/run",
                           "--tmpfs=/run/lock", "--tmpfs=/tmp", "--volume=/sys/fs/cgroup:/sys/fs/cgroup:rw",
                           "--env=container=docker", "tqkv-systemd")

        def inside(*command, **options):
            return self.engine.docker("exec", "machine", *command, **options)

        def unit():
            text = inside("systemctl", "show", "tqkvd", check=False).stdout
            return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

        ctl = ("tqkvctl", "--token-file", "/root/admin")
        started = wait_for("the unit", lambda: unit().get("SubState") == "running" and unit())
        pid = started["MainPID"]
        self.assertEqual((started["Type"], started["NRestarts"]), ("notify", "0"))
        status = inside("cat", f"/proc/{pid}/status").stdout
        uid = inside("id", "-u", "tqkv").stdout.strip()
        self.assertRegex(status, rf"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
            self.assertIn(line, status)
        self.assertEqual(inside("stat", "-c", "%U %G %a", "/run/tqkv/tqkvd.sock").stdout, "tqkv tqkv 660\n")
        info = json.loads(inside(*ctl, "--json", "info").stdout)
        io = info.get("info", info)["io"]
        self.assertEqual(io, "io_uring" if host_has_io_uring() else "epoll")
        self.assertIn("accounts add up", inside(*ctl, "replay", "/usr/share/tqkv/demo.safetensors").stdout)
        # A reload that is right, and one that is not: the daemon goes on as it was.
        inside("sed", "-i", "s/{/{\"log_level\": \"debug\", /", "/etc/tqkv/tqkvd.json")
        inside("systemctl", "reload", "tqkvd")
        wait_for("the reload", lambda: "configuration reloaded" in inside("journalctl", "--unit=tqkvd").stdout)
        inside("sh", "-c", "echo nonsense >>/etc/tqkv/tqkvd.json")
        inside("systemctl", "reload", "tqkvd")
        wait_for("the refusal", lambda: "reload refused" in inside("journalctl", "--unit=tqkvd").stdout)
        inside("sed", "-i", "/nonsense/d", "/etc/tqkv/tqkvd.json")
        self.assertEqual(unit()["MainPID"], pid)
        # A loop that stands still.
        inside("systemctl", "kill", "--signal=STOP", "tqkvd")
        after = wait_for("the watchdog", lambda: unit().get("NRestarts") == "1" and unit()["SubState"] == "running" and unit())
        self.assertNotEqual(after["MainPID"], pid)
        wait_for("the restarted daemon", lambda: inside("tqkvctl", "ready", check=False).returncode == 0)
        inside("systemctl", "stop", "tqkvd")
        ended = unit()
        self.assertEqual((ended["ActiveState"], ended["Result"], ended["ExecMainStatus"]), ("inactive", "success", "0"))
        self.assertNotEqual(inside("test", "-S", "/run/tqkv/tqkvd.sock", check=False).returncode, 0)
        # A configuration that is wrong is no better the next time.
        inside("sh", "-c", "echo '{\"memory\": 7}' >/etc/tqkv/tqkvd.json")
        self.assertNotEqual(inside("systemctl", "start", "tqkvd", check=False).returncode, 0)
        failed = unit()
        self.assertEqual((failed["ActiveState"], failed["ExecMainStatus"], failed["NRestarts"]), ("failed", "2", "0"))
        self.engine.docker("rm", "--force", "machine")

    # ---- the gpu image ----

    def test_9_gpu_image(self):
        """Compiled with this machine's toolkit, it holds no CUDA, and without a driver it says what is missing (exit code 3)."""
        toolkit = pathlib.Path("/usr/local/cuda")
        if not os.environ.get("TQKV_DEPLOY_GPU"):
            self.skipTest("TQKV_DEPLOY_GPU=1 builds the gpu image, which takes some minutes")
        if not (toolkit / "bin/nvcc").exists():
            self.skipTest("no CUDA Toolkit in /usr/local/cuda")
        # The parts of the toolkit that compile, laid out as in the image that the Dockerfile names.
        root = self.engine.folder / "cuda"
        target = root / "usr/local/cuda-here"
        library = target / "targets/x86_64-linux/lib"
        library.mkdir(parents=True)
        (root / "etc/alternatives").mkdir(parents=True)
        (root / "usr/local/cuda").symlink_to("/etc/alternatives/cuda")
        (root / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-here")
        for part in ("bin", "nvvm"):
            shutil.copytree(toolkit.resolve() / part, target / part)
        shutil.copytree((toolkit / "targets/x86_64-linux/include").resolve(), target / "targets/x86_64-linux/include")
        for name in ("libcudart_static.a", "libcudadevrt.a"):
            shutil.copy((toolkit / "lib64" / name).resolve(), library)
        (target / "lib64").symlink_to("targets/x86_64-linux/lib")
        (target / "include").symlink_to("targets/x86_64-linux/include")
        name = re.search(r"^ARG CUDA_IMAGE=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.M).group(1)
        tar = self.engine.folder / "cuda.tar"
        self.engine.run("tar", "-C", root, "-cf", tar, ".")
        self.engine.docker("import", tar, name)
        self.engine.docker("build", "--network=host", "--file", DEPLOY / "Dockerfile", "--target", "gpu", "--tag",
                           "tqkv-gpu:built", ROOT, timeout=1800)
        run = ("run", "--rm", "--network=none")
        self.assertRegex(self.engine.docker(*run, "tqkv-gpu:built", "--version").stdout, r"cuda \d+\.\d+")
        held = self.engine.docker(*run, "--entrypoint=sh", "tqkv-gpu:built", "-c",
                                  "ldd /usr/bin/tqkvd; find / -xdev -name '*cuda*' 2>/dev/null; true").stdout
        self.assertNotIn("cuda", held)
        done = self.engine.docker(*run, "tqkv-gpu:built", "--backend", "cuda", "--memory", "64MiB", check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("no CUDA device", done.stderr)
        # Where no device is, the same image serves from host memory.
        script = "tqkvd --memory 64MiB --listen unix:/run/tqkv/s & sleep 1; tqkvctl ready; kill $!; wait $!; echo ended with $?"
        done = self.engine.docker(*run, "--entrypoint=sh", "tqkv-gpu:built", "-c", script)
        self.assertEqual(done.stdout, "ready\nended with 0\n")
