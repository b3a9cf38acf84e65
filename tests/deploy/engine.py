"""A private Docker engine: dockerd and containerd of its own, in a mount namespace of its own, everything else in one folder.

It has no default bridge and writes no firewall rules (docker-proxy alone serves published ports), so that nothing of it
outlives stop(), which checks that; a suite that is killed takes it along. The machine's own engine, if there is one, is never spoken to: every command names this
engine's socket.
"""

import atexit
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time

START_S = 60

SCRIPT = """
setpriv --pdeathsig KILL containerd --address "$1/containerd.sock" --root "$1/containerd" --state "$1/containerd-state" >"$1/containerd.log" 2>&1 &
echo $! >"$1/containerd.pid"
n=0
while [ ! -S "$1/containerd.sock" ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n + 1)); done
exec dockerd --host "unix://$1/docker.sock" --containerd "$1/containerd.sock" --data-root "$1/data" \\
    --exec-root "$1/exec" --pidfile "$1/docker.pid" --bridge=none --iptables=false --ip6tables=false \\
    --ip-forward=false --cgroup-parent="$2" --exec-opt native.cgroupdriver=cgroupfs >"$1/dockerd.log" 2>&1
"""


def why_not():
    """None, or why this machine can have no engine."""
    if os.geteuid() != 0:
        return "a container engine needs root"
    for program in ("dockerd", "containerd", "runc", "mmdebstrap", "unshare"):
        if not shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin:/sbin"):
            return f"{program} is not installed (Debian: docker.io, mmdebstrap)"
    return None


def tail(path, n=30):
    return "\n".join(path.read_text(errors="replace").splitlines()[-n:]) if path.exists() else ""


class Engine:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True)
        self.cgroup = f"/tqkv-deploy-{os.getpid()}"
        self.interfaces_before = self.interfaces()
        # /usr/bin first: that client belongs to the engine of the distribution.
        path = "/usr/sbin:/usr/bin:/sbin:/bin:" + os.environ["PATH"]
        self.env = dict(os.environ, PATH=path, DOCKER_HOST=f"unix://{self.folder}/docker.sock", DOCKER_BUILDKIT="1",
                        DOCKER_CONFIG=str(self.folder / "client"), COMPOSE_PROJECT_NAME=f"tqkv{os.getpid()}",
                        COMPOSE_ANSI="never", BUILDKIT_PROGRESS="plain")
        for name in [name for name in self.env if name.startswith(("DOCKER_CONTEXT", "DOCKER_TLS", "COMPOSE_FILE"))]:
            del self.env[name]
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "setpriv", "--pdeathsig", "TERM", "sh", "-c", SCRIPT,
             "engine", str(self.folder), self.cgroup], env=self.env, stdin=subprocess.DEVNULL)
        self.is_stopped = False
        atexit.register(self.stop)
        if shutil.which("docker-compose", path=path):
            self.compose_command = ["docker-compose"]
        else:
            self.compose_command = ["docker", "compose"]

    def wait(self):
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            if self.run("docker", "version", check=False, timeout=20).returncode == 0:
                return
            time.sleep(0.2)
        raise AssertionError(f"the engine did not start:\n{tail(self.folder / 'containerd.log')}\n"
                             f"{tail(self.folder / 'dockerd.log')}")

    def run(self, *command, check=True, timeout=300, input=None, env=None, cwd=None):
        done = subprocess.run([str(part) for part in command], env=dict(self.env, **(env or {})), capture_output=True,
                              text=True, timeout=timeout, input=input, cwd=cwd,
                              **({} if input is not None else {"stdin": subprocess.DEVNULL}))
        if check:
            assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    def docker(self, *arguments, **options):
        return self.run("docker", *arguments, **options)

    def inspect(self, name):
        return json.loads(self.docker("inspect", name).stdout)[0]

    @staticmethod
    def interfaces():
        return set(os.listdir("/sys/class/net"))

    def stop(self):
        """Ends it and returns what it left behind: a list that should be empty."""
        if self.is_stopped:
            return []
        self.is_stopped = True
        ids = self.docker("ps", "--all", "--quiet", check=False).stdout.split()
        if ids:
            self.docker("rm", "--force", *ids, check=False)
        networks = self.docker("network", "ls", "--quiet", "--filter", "type=custom", check=False).stdout.split()
        for network in networks:
            self.docker("network", "rm", network, check=False)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stop_containerd()
        return self.leftovers()

    def stop_containerd(self):
        path = self.folder / "containerd.pid"
        pid = int(path.read_text()) if path.exists() else 0
        if not pid:
            return
        for signal_number, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            end = time.monotonic() + patience_s
            try:
                os.kill(pid, signal_number)
                while time.monotonic() < end:
                    os.kill(pid, 0)
                    time.sleep(0.1)
            except ProcessLookupError:
                return

    def leftovers(self):
        found = []
        for root, folders, _ in os.walk("/sys/fs/cgroup", topdown=False):
            for name in folders:
                path = os.path.join(root, name)
                if f"{self.cgroup}/" in path + "/":
                    try:
                        os.rmdir(path)
                    except OSError as error:
                        found.append(f"cgroup {path}: {error}")
        found += [f"interface {name}" for name in self.interfaces() - self.interfaces_before]
        mounts = pathlib.Path("/proc/self/mounts").read_text()
        found += [f"mount {line}" for line in mounts.splitlines() if str(self.folder) in line]
        rules = subprocess.run(["iptables-save"], capture_output=True, text=True, env=self.env) \
            if shutil.which("iptables-save", path=self.env["PATH"]) else None
        # A machine with an engine of its own has such rules; then they are not ours.
        if rules and "docker0" not in self.interfaces_before:
            found += [f"firewall rule {line}" for line in rules.stdout.splitlines() if "DOCKER" in line]
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            found.append(f"files in {self.folder}")
        return found


def make_base_image(engine, name):
    """Debian as the official slim image has it, from packages, under the name that the Dockerfile asks for."""
    tar = engine.folder / "base.tar"
    # Without waiting for the disk, as the official image does it.
    slim = ["--dpkgopt=force-unsafe-io"] + [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "man", "locale", "info")]
    done = engine.run("mmdebstrap", "--variant=minbase", "--quiet", *slim, "bookworm", tar, check=False)
    assert done.returncode == 0, f"mmdebstrap: {done.stderr[-3000:]}"
    engine.docker("import", tar, name)
    tar.unlink()
