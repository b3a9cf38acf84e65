"""Start, stop, restart, refuse: what an operator does to the process."""

import json
import pathlib
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest

import frames
from daemon import BUILD, DEMO, EXACT, Daemon


def run(*args, timeout=60):
    return subprocess.run([str(BUILD / "server/tqkvd"), *map(str, args)], capture_output=True, text=True,
                          timeout=timeout, stdin=subprocess.DEVNULL)


class CommandLine(unittest.TestCase):
    def test_help_and_version_say_what_is_asked(self):
        done = run("--help")
        self.assertEqual(done.returncode, 0)
        for word in ("--listen", "--http", "--pool", "--backend", "--frame-bytes-max", "TQKV_"):
            self.assertIn(word, done.stdout)
        done = run("--version")
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"tqkvd \d+\.\d+\.\d+")

    def test_usage_errors_exit_2_and_name_the_option(self):
        for args, words in [
            (["--frame-bytes-max", "3"], ["frame-bytes-max", "3"]),
            (["--no-such-option"], ["no-such-option"]),
            (["--backend", "tpu"], ["backend", "tpu", "cpu"]),
            (["--listen", "tcp:0.0.0.0:0"], ["0.0.0.0", "insecure"]),
            (["--http", "192.0.2.1:80"], ["192.0.2.1", "insecure"]),
            (["--pool", "name=x,layers=1,q_heads=1,kv_heads=1,head_dim=20,k=f32,v=f32,block_size=16,blocks=4"],
             ["head_dim", "20"]),
            (["--pool", "name=x,layers=1,q_heads=3,kv_heads=2,head_dim=16,k=f32,v=f32,block_size=16,blocks=4"],
             ["q_heads"]),
            (["--pool", "name=x,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f99,v=f32,block_size=16,blocks=4"],
             ["f99", "tq4"]),
            (["--config", "/nonexistent.json"], ["/nonexistent.json"]),
        ]:
            with self.subTest(args=args):
                done = run(*args, "--check-config")
                self.assertEqual(done.returncode, 2, done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)

    def test_a_snapshot_folder_that_cannot_take_a_snapshot_is_found_at_the_start(self):
        """A drain would find it out with rows in hand and nowhere to put them."""
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            file = pathlib.Path(folder) / "file"
            file.touch()
            for path, word in ((pathlib.Path(folder) / "missing", "No such file or directory; make it"), (file, "is no folder")):
                for how in (["--check-config"], ["--listen", f"unix:{folder}/s", "--http", "off", "--memory", "64MiB"]):
                    with self.subTest(path=path, how=how[0]):
                        done = run("--snapshot-dir", path, *how)
                        self.assertEqual(done.returncode, 2, done.stderr)
                        self.assertIn(f"snapshot_dir: {path}", done.stderr)
                        self.assertIn(word, done.stderr)
            self.assertEqual(run("--snapshot-dir", folder, "--check-config").returncode, 0)

    def test_check_config_finds_pools_that_do_not_fit(self):
        pool = "name=x,layers=32,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=1024"
        done = run("--check-config", "--memory", "64MiB", "--pool", pool)
        self.assertEqual(done.returncode, 2)
        self.assertIn('--pool number 1: pool "x" takes 75497472 bytes, of memory (64MiB) 67108864 are left', done.stderr)
        self.assertEqual(run("--check-config", "--memory", "80MiB", "--pool", pool).returncode, 0)

    def test_check_config_accepts_what_the_daemon_tells_about_itself(self):
        with Daemon("--pool", DEMO) as daemon, tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(daemon.get("/v1/config"), file)
            file.flush()
            done = run("--config", file.name, "--check-config")
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_a_bad_config_file_is_named_with_the_place(self):
        for text, words in [('{"frame_bytes_max": 1, }', [":1:24"]), ('{"frames": 1}', ["frames"]),
                            ('{"io": "epoll", "io": "epoll"}', ["io"]), ('{"pools": [{"name": 3}]}', ["name"]),
                            ("", [":1:0"])]:
            with self.subTest(text=text), tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                file.write(text)
                file.flush()
                done = run("--config", file.name, "--check-config")
                self.assertEqual(done.returncode, 2)
                for word in [file.name, *words]:
                    self.assertIn(word, done.stderr)


class Process(unittest.TestCase):
    def test_sigterm_answers_what_is_in_flight_and_exits_0(self):
        with Daemon("--pool", EXACT) as daemon, frames.Raw(daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"exact")
            row = struct.pack("<64f", *range(64))
            for i in range(8):
                raw.send(frames.rows(frames.APPEND, session, [(1, i, 1, 0, i == 0)], k=row, v=row, request_id=10 + i))
            daemon.process.send_signal(signal.SIGTERM)
            seen = {}
            try:
                while True:
                    reply = raw.reply()
                    seen[reply.request_id] = reply
            except EOFError:
                pass
            self.assertEqual(daemon.stop(), 0)
            self.assertIn(0, seen, "no GOAWAY")
            self.assertEqual(seen[0].opcode, frames.GOAWAY)
            self.assertEqual(seen[0].status, 404)
            for request_id, reply in seen.items():
                if request_id:
                    self.assertIn(reply.status, (0, 404))

    def drain(self, stop, *args):
        """Told to stop, the daemon lets a session go on and no new one begin, until its time is over; then it ends with 0."""
        row = struct.pack("<64f", *range(64))
        with Daemon("--pool", EXACT, "--drain-timeout-ms", "1500", *args) as daemon, frames.Raw(daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"exact", name=b"stays")
            position = 0

            def append():
                nonlocal position
                data = frames.rows(frames.APPEND, session, [(1, position, 1, 0, position == 0)], n_layers=2, k=row * 2, v=row * 2)
                reply = raw.call(data)
                if reply.status == 0:
                    self.assertEqual(reply.item_statuses(), [0])
                    position += 1
                return reply.status

            self.assertEqual(append(), 0)
            started = time.monotonic()
            stop(daemon)
            told = raw.reply()
            self.assertEqual((told.opcode, told.status, told.request_id), (frames.GOAWAY, 404, 0))
            self.assertEqual(raw.call(frames.open_session(b"exact")).status, 404)
            self.assertEqual(daemon.metrics()["tqkv_draining"], 1)
            self.assertEqual(daemon.request("GET", "/readyz")[0], 503)
            with socket.socket(socket.AF_UNIX) as late, self.assertRaises(OSError):
                late.connect(str(daemon.path))
            try:
                while append() == 0:
                    time.sleep(0.01)
            except (EOFError, OSError):
                pass
            self.assertGreater(time.monotonic() - started, 1.4)
            self.assertEqual(daemon.stop(), 0)
            self.assertGreater(position, 10)
            self.assertIn("stopping: sessions (1) go on for at most 1500 ms", daemon.log())
            lost = "warning 1 sessions end here, and their rows with them: snapshot_on_drain is off"
            self.assertEqual(lost in daemon.log(), "--snapshot-on-drain" not in args)
            return position

    def test_draining_lets_sessions_go_on(self):
        """FAILURES M11: over HTTP and by SIGTERM; with --snapshot-on-drain nothing that was acknowledged is missing."""
        def over_http(daemon):
            self.assertEqual(daemon.request("POST", "/v1/drain", {})[0], 202)

        self.drain(over_http)
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            saving = ("--snapshot-dir", folder, "--snapshot-on-drain")
            length = self.drain(lambda daemon: daemon.process.send_signal(signal.SIGTERM), *saving)
            with Daemon("--pool", EXACT, *saving) as daemon, frames.Raw(daemon.addr) as raw:
                raw.hello()
                op = struct.pack("<HHHHIIIIQ32x", 0, 5, 0, 0, 0, 0, 0, 0, 0)
                session = struct.unpack_from("<Q", raw.call(frames.frame(18, op, payload=b"stays")).op)[0]
                tell = raw.call(frames.frame(frames.TELL, struct.pack("<QII", 0, 16, 0), session=session))
                # The last append may have been done without its answer having been read.
                self.assertIn(struct.unpack_from("<Q2I", tell.items[0])[1:], [(n, n) for n in (length, length + 1)])

    def test_an_idle_daemon_stops_at_once(self):
        """Nothing in flight: no operation may be waited for that never completes."""
        times = []
        for _ in range(3):  # others may use the machine: not all of three are held up
            with Daemon("--pool", DEMO) as daemon, frames.Raw(daemon.addr) as raw:
                raw.hello()
                started = time.monotonic()
                self.assertEqual(daemon.stop(), 0)
                times.append(time.monotonic() - started)
                if daemon.is_sanitized() or times[-1] < 0.7:
                    return
        self.fail(f"seconds: {times}")

    def test_a_taken_port_or_socket_is_exit_3_with_the_address(self):
        with Daemon("--pool", DEMO) as daemon:
            done = run("--listen", daemon.addr, "--http", "off", "--memory", "64MiB")
            self.assertEqual(done.returncode, 3)
            self.assertIn(str(daemon.path), done.stderr)
            done = run("--listen", daemon.tcp, "--http", "off", "--memory", "64MiB")
            self.assertEqual(done.returncode, 3)
            self.assertIn("127.0.0.1", done.stderr)
            self.assertEqual(daemon.request("GET", "/livez")[0], 200)

    def test_a_file_that_is_no_socket_is_never_removed(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "precious"
            path.write_text("data")
            done = run("--listen", f"unix:{path}", "--http", "off", "--memory", "64MiB")
            self.assertEqual(done.returncode, 3)
            self.assertIn(str(path), done.stderr)
            self.assertEqual(path.read_text(), "data")

    def test_backend_cuda_without_a_device_is_exit_3_with_the_reason(self):
        done = run("--backend", "cuda", "--listen", "tcp:127.0.0.1:0", "--http", "off", "--memory", "64MiB")
        self.assertEqual(done.returncode, 3)
        self.assertRegex(done.stderr, "cannot start: backend cuda: .*(no CUDA device: CUDA error [0-9]+, .|built without CUDA)")

    def test_backend_auto_without_a_device_says_so_once_and_serves(self):
        """From host memory; the line that names the backend has the reason, and so has the control API."""
        with Daemon("--backend", "auto") as daemon:
            if daemon.get("/v1/info")["backend"] == "cuda":
                self.skipTest("there is a device")
            daemon.request("GET", "/readyz?deep=1")
            said = re.findall("no CUDA device: CUDA error [0-9]+|built without CUDA", daemon.log())
            self.assertEqual(len(said), 1, daemon.log())
            self.assertRegex(daemon.log(), r"Z info backend CPU .*\(.*CUDA.*\), instruction set")
            self.assertIn("CUDA", daemon.get("/v1/info")["backend_reason"])

    def test_more_memory_than_there_is_names_wanted_and_free(self):
        done = run("--listen", "tcp:127.0.0.1:0", "--http", "off", "--memory", "64MiB", "--pool",
                   "name=big,layers=32,q_heads=32,kv_heads=8,head_dim=128,k=bf16,v=bf16,block_size=16,blocks=4096")
        self.assertEqual(done.returncode, 3)
        self.assertIn("big", done.stderr)
        self.assertRegex(done.stderr, r"\d{9,}")

    def test_restart_after_kill_is_noticed_by_every_client(self):
        """FAILURES L12, W12: the address is free again at once; old handles name nothing."""
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            first = Daemon("--pool", EXACT, folder=folder)
            with frames.Raw(first.addr) as raw:
                boot_id = struct.unpack_from("<Q", raw.hello().op, 8)[0]
                session = raw.open(b"exact")
                first.process.kill()
                first.process.wait()
                self.assertTrue(raw.is_closed())
            first.log_file.close()
            with Daemon("--pool", EXACT, folder=folder) as second, frames.Raw(second.addr) as raw:
                reply = raw.call(frames.hello(boot_id_seen=boot_id))
                self.assertEqual(reply.status, 302)
                self.assertNotEqual(struct.unpack_from("<Q", reply.op, 8)[0], boot_id)
                self.assertEqual(raw.call(frames.frame(frames.TELL, b"\0" * 16, session=session)).status, 302)

    def test_a_lease_outlives_its_connection_and_ends(self):
        """A lost connection keeps its session for the lease: another one attaches, asks for the lengths and goes on. Then it
        expires, whoever asks for it is told so, and its blocks are free."""
        row = struct.pack("<64f", *range(64))

        def append(raw, session, position):
            return raw.call(frames.rows(frames.APPEND, session, [(1, position, 1, 0, position == 0)], n_layers=2, k=row * 2,
                                        v=row * 2))

        def attach(raw, name):
            op = struct.pack("<HHHHIIIIQ32x", 0, len(name), 0, 0, 0, 0, 0, 0, 0)
            return raw.call(frames.frame(18, op, payload=name))

        with Daemon("--pool", EXACT) as daemon:
            for name, lease_ms in ((b"long", 600_000), (b"short", 1000)):
                with frames.Raw(daemon.addr) as raw:
                    raw.hello()
                    session = raw.open(b"exact", name=name, lease_ms=lease_ms)
                    self.assertEqual(append(raw, session, 0).item_statuses(), [0])
            with frames.Raw(daemon.addr) as raw:
                raw.hello()
                session = struct.unpack_from("<Q", attach(raw, b"long").op)[0]
                tell = raw.call(frames.frame(frames.TELL, struct.pack("<QII", 0, 16, 0), session=session))
                self.assertEqual(struct.unpack_from("<Q2I", tell.items[0]), (1, 1, 1))
                self.assertEqual(append(raw, session, 1).item_statuses(), [0])
                end = time.monotonic() + 60
                while daemon.metrics()["tqkv_sessions_expired_total"] == 0 and time.monotonic() < end:
                    time.sleep(0.05)  # it must not be asked for: ATTACH would renew it
                self.assertEqual(attach(raw, b"short").status, 303)
                self.assertEqual([row["name"] for row in daemon.get("/v1/sessions")["sessions"]], ["long"])
                self.assertEqual(append(raw, session, 2).item_statuses(), [0])
                blocks = daemon.get("/v1/occupancy")["totals"]["blocks"]
                self.assertEqual(blocks["total"] - blocks["free"], 1)

    def test_peers_that_use_up_the_descriptors_leave_some_for_the_operator(self):
        few = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
        with Daemon("--hello-timeout-ms", "60000", wrapper=few) as daemon:
            self.assertIn("descriptors limited to 64: 32 connections at a time", daemon.log())
            peers = [frames.Raw(daemon.tcp) for _ in range(100)]
            self.assertEqual(sum(self.is_open(peer) for peer in peers), 32)
            self.assertEqual(daemon.get("/v1/info")["pid"], daemon.process.pid)
            for peer in peers:
                peer.close()

    def is_open(self, peer):
        """Whether the daemon kept it: what it refuses it closes as it accepts it, and it takes them in order."""
        try:
            peer.send(frames.hello())
            return peer.reply().status == 0
        except (EOFError, ConnectionError):
            return False

    def test_a_fresh_daemon_is_small(self):
        """Resident memory minus pools minus slots is at most 64 MiB; the daemon prints both."""
        with Daemon("--pool", DEMO) as daemon:
            log = daemon.log()
            self.assertRegex(log, r"memory: pools \d+ bytes, request slots \d+ bytes")
            if not daemon.is_sanitized():
                self.assertLess(daemon.resident_bytes(), 64 << 20)


class Listeners(unittest.TestCase):
    def test_unix_socket_and_tcp_serve_the_same_pools(self):
        with Daemon("--pool", DEMO) as daemon:
            for addr in (daemon.addr, daemon.tcp):
                with frames.Raw(addr) as raw:
                    self.assertEqual(struct.unpack_from("<H", raw.hello().op, 6)[0], 1)

    def test_socket_mode_keeps_others_out(self):
        with Daemon("--pool", DEMO) as daemon:
            self.assertEqual(daemon.path.stat().st_mode & 0o777, 0o660)

    def test_the_socket_file_is_removed_at_the_end(self):
        with Daemon("--pool", DEMO) as daemon:
            self.assertEqual(daemon.stop(), 0)
            self.assertFalse(daemon.path.exists())


if __name__ == "__main__":
    unittest.main()
