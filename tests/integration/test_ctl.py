"""tqkvctl against a real daemon: what it prints, what it returns, and what it says when something is wrong."""

import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import tempfile
import threading
import unittest

import frames
import numpy as np
import tqkv
from daemon import BUILD, CAPTURE, DEMO, EXACT, PATIENCE_S, Daemon

CTL = str(BUILD / "server/tqkvctl")


def run(*args, env=None, cwd=None):
    return subprocess.run([CTL, *map(str, args)], capture_output=True, text=True, timeout=PATIENCE_S,
                          stdin=subprocess.DEVNULL, env=env, cwd=cwd)


class Capture:
    """A small capture of two layers whose parts a test may spoil. Attention over it is well behaved."""

    TOKENS, Q_HEADS, KV_HEADS, DIM = 24, 2, 1, 16

    def __init__(self):
        self.tensors = {}
        for layer in (0, 3):
            for kind, heads in (("k", self.KV_HEADS), ("v", self.KV_HEADS), ("q", self.Q_HEADS)):
                n = self.TOKENS * heads * self.DIM
                values = [((i * 37 + layer * 11 + ord(kind) * 5) % 101 - 50) / 50 for i in range(n)]
                self.tensors[f"{kind}.{layer}"] = ("F32", [self.TOKENS, heads, self.DIM],
                                                   struct.pack(f"<{n}f", *values))
        self.metadata = {"model": "made up"}

    def bytes(self):
        header, data = {"__metadata__": self.metadata}, b""
        for name, (dtype, shape, values) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
            data += values
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data


class WithDaemon(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon("--backend", "cpu-scalar", "--pool", DEMO, "--pool", EXACT)
        cls.files = tempfile.TemporaryDirectory(prefix="tqkv-test.")

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        cls.files.cleanup()
        assert code == 0, code

    def json(self, *args):
        done = self.daemon.ctl(*args, "--json")
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def text(self, *args):
        done = self.daemon.ctl(*args)
        self.assertEqual(done.stderr, "")
        self.assertFalse(re.search("[\x00-\x08\x0b-\x1f\x7f]", done.stdout), "control characters")
        return done.stdout

    def fails(self, *args, words=(), code=1):
        """Exit 1 with one sentence that holds the words, and nothing on standard output."""
        done = self.daemon.ctl(*args, check=False)
        self.assertEqual(done.returncode, code, done)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("tqkvctl "), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)
        return done.stderr

    def file(self, data):
        path = pathlib.Path(self.files.name) / "capture.safetensors"
        path.write_bytes(data)
        return path


class Questions(WithDaemon):
    def test_ping(self):
        self.assertRegex(self.text("ping"),
                         r"protocol 1, boot id [0-9a-f]{16}, 2 pools.*\n.*10 round trips: p50 \S+ \ws")
        answer = self.json("ping", "-n", 25)
        self.assertEqual((answer["n"], answer["n_pools"], answer["protocol"]), (25, 2, 1))
        self.assertEqual(answer["boot_id"], self.daemon.get("/v1/info")["boot_id"])
        self.assertTrue(0 < answer["p50_ns"] <= answer["p90_ns"] <= answer["p99_ns"])
        for addr in (self.daemon.addr, self.daemon.tcp):
            self.assertEqual(run("--addr", addr, "ping").returncode, 0)
            self.assertEqual(run("ping", env=dict(os.environ, TQKV_ADDR=addr)).returncode, 0)

    def test_info(self):
        text = self.text("info")
        for word in ("tqkvd", "backend", "arena", self.daemon.addr, self.daemon.tcp, "demo", "exact", "tq4"):
            self.assertIn(word, text)
        answer = self.json("info")
        self.assertEqual(answer["info"]["pid"] if "info" in answer else answer["pid"], self.daemon.process.pid)

    def test_ready(self):
        """What health checks call: one word and exit code 0; deep runs a decode. A daemon that is not there: exit code 1."""
        self.assertEqual(self.text("ready"), "ready\n")
        self.assertEqual(self.text("ready", "--deep"), "ready\n")
        self.assertIsInstance(self.json("ready"), dict)

    def test_occupancy_and_sessions(self):
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            self.assertIn("no sessions", self.text("sessions"))
            session = raw.open(b"exact", name=b"seen")
            row = struct.pack("<64f", *range(64))
            raw.call(frames.rows(frames.APPEND, session, [(9, 0, 20, 0, 1)], n_layers=2, k=row * 40, v=row * 40))
            text = self.text("sessions")
            self.assertRegex(text, rf"{session:016x}.*seen")
            answer = self.json("sessions")
            self.assertEqual([s["name"] for s in answer["sessions"]], ["seen"])
            self.assertRegex(self.text("sessions", f"{session:016x}"), r"(?m)^\s*9\s+20\b")
            answer = self.json("sessions", f"{session:016x}")
            self.assertEqual(self.json("sessions", "seen")["sequences"][0]["id"], "9")
            self.assertEqual([s["id"] for s in answer["sequences"]], ["9"])
            self.assertRegex(self.text("occupancy"), r"(?m)^exact\s+1\s+1\s+20\s+64\s+62\b")
            answer = self.json("occupancy")
            self.assertEqual([pool["blocks"]["owned"] for pool in answer["pools"]], [0, 2])
            raw.call(frames.frame(frames.CLOSE, session=session))
        self.fails("sessions", f"{session:016x}", words=["STALE_HANDLE", f"{session:016x}"])
        self.fails("sessions", "xyz", words=["'xyz'", "16 hex digits"], code=2)

    def test_top(self):
        """Two looks: rates only between them, the largest sessions first, an object a line with --json."""
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            row = struct.pack("<64f", *range(64))
            for n_tokens, name in ((3, b"small"), (30, b"large")):
                session = raw.open(b"exact", name=name)
                raw.call(frames.rows(frames.APPEND, session, [(9, 0, n_tokens, 0, 1)], n_layers=2,
                                     k=row * 2 * n_tokens, v=row * 2 * n_tokens))
            text = self.text("top", "--count", 2, "--interval-ms", 100, "--sessions", 1)
            self.assertRegex(text, r"(?s)second look on.*health    ready.*requests/s.*and 1 more")
            self.assertRegex(text, r"(?m)^[0-9a-f]{16}  large +exact")
            self.assertNotIn("small", text)
            self.assertNotIn("\x1b", text)
            done = run("--http", self.daemon.http, "--json", "top", "--count", 2, "--interval-ms", 100)
            first, second = map(json.loads, done.stdout.splitlines())
            self.assertIsNone(first["load"])
            self.assertGreaterEqual(second["load"]["rows_in_per_s"], 0)
            self.assertEqual(len(second["sessions"]), 2)

    def test_plan(self):
        """By hand for one model; the daemon and tqkvctl alone work out the same; what is unknown is named."""
        numbers = ["--model", "Llama-3.1-8B", "--context", 32768, "--sessions", 16, "--memory", "80GiB",
                   "--device-bytes-per-s", 4 * 10**12]
        alone = self.json("plan", "--offline", *numbers)
        self.assertEqual(alone, self.json("plan", *numbers))
        self.assertEqual(alone["token_bytes"], 32 * 8 * 2 * 68)
        self.assertEqual(alone["token_dense_bytes"], 32 * 8 * 2 * 256)
        self.assertEqual(alone["fits"]["n_sessions"], (80 << 30) // (16 * 34816) // 2048)
        self.assertEqual(alone["decode"]["floor_us"], -(-16 * 32768 * 34816 // 4000000))
        text = self.text("plan", "--model", "smollm2-135m", "--sessions", 100000)
        self.assertRegex(text, r"(?m)^fits +NO: \d+ sessions of that length into ")
        exact = self.json("plan", "--offline", *numbers, "--exact-tokens", 128)
        self.assertEqual(exact, self.json("plan", *numbers, "--exact-tokens", 128))
        self.assertEqual(exact["context_bytes"], alone["context_bytes"] + 128 * alone["token_dense_bytes"])
        self.assertEqual(exact["fits"]["n_sessions"], (80 << 30) // exact["context_bytes"])
        self.assertRegex(self.text("plan", *numbers, "--exact-tokens", 128), r"(?m)^exact +the newest 128 tokens")
        self.fails("plan", *numbers, "--preset", "k8v4", "--k", "tq5", code=2, words=["--preset", "--k"])
        self.fails("plan", *numbers, "--exact-tokens", 100, words=["exact_tokens", "16"])
        self.assertGreater(len(self.json("plan", "--list")), 30)
        self.assertIn("qwen3-8b", self.text("plan", "--list"))
        named = self.json("plan", "--offline", "--model", "meta-llama/Llama-3.1-8B-Instruct", *numbers[2:])
        self.assertEqual(named, alone)
        self.fails("plan", "--model", "llama-3.1-8b-something", words=["--list"], code=2)
        self.fails("plan", "--model", "llama-17", words=["llama-17", "--list"], code=2)
        self.fails("plan", words=["--layers", "--model"], code=2)
        self.fails("plan", "--offline", "--model", "phi-4", words=["--memory"], code=2)

    def test_every_model_of_the_plan_has_a_pool(self):
        for model in self.json("plan", "--list"):
            self.assertEqual(model["q_heads"] % model["kv_heads"], 0, model)
            self.json("plan", "--offline", "--memory", "1GiB", "--model", model["name"])

    def test_more_sessions_than_one_answer_holds(self):
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            handles = [raw.open(b"exact") for _ in range(300)]
            self.assertEqual(len(self.json("sessions")["sessions"]), 300)
            self.assertEqual(self.text("sessions").count("exact"), 300)
            for handle in handles:
                raw.call(frames.frame(frames.CLOSE, session=handle))

    def test_benches_run(self):
        """That they run and count, not how fast."""
        answer = self.json("bench", "echo", "-n", 50, "--bytes-in", "10KiB", "--bytes-out", "100KiB")
        self.assertEqual((answer["n"], answer["bytes_in"], answer["bytes_out"]), (50, 10240, 102400))
        self.assertIn("50 round trips", self.text("bench", "echo", "-n", 50))
        answer = self.json("bench", "step", "-n", 20, "--rounds", 3, "--sequences", 3, "--context", 20)
        self.assertEqual((answer["n"], len(answer["rounds"]), answer["sequences"]), (20, 3, 3))
        self.assertGreater(answer["ratio_p50"], 0)
        self.assertIn("ratio of p50", self.text("bench", "step", "-n", 20, "--rounds", 1, "--k", "bf16", "--v", "f32"))
        self.assertEqual([pool["name"] for pool in self.daemon.get("/v1/pools")["pools"]], ["demo", "exact"])
        answer = self.json("bench", "cpu", "--format", "tq4", "--tokens", 100, "--sequences", 2, "--rounds", 1, "--scalar")
        self.assertEqual(answer["decodes"][-1]["set"], "scalar")
        self.assertEqual({line["set"] for line in answer["decodes"][:-1]}, {line["set"] for line in answer["sets"]})
        for line in answer["decodes"]:
            self.assertEqual((line["bytes"], line["products"]), (200 * 8 * 2 * 68, 2 * 200 * 32 * 128))
            self.assertGreater(line["decode_s"], 0)
        self.assertEqual({row["set"] for row in answer["sets"] + answer["not_measured"]}, {"avx2", "avx512"})
        one = ("--format", "tq4", "--tokens", 64, "--sequences", 1, "--rounds", 1, "--set", "avx2")
        why = "--set asks for another one" if "avx512" in {row["set"] for row in answer["sets"]} else "does not have it"
        self.assertRegex(self.text("bench", "cpu", *one), f"avx512: not measured, .*{why}")
        self.assertIn(why, self.json("bench", "cpu", *one)["not_measured"][-1]["why"])
        self.fails("bench", "cpu", "--set", "sse", words=["sse", "avx2"], code=2)
        self.fails("bench", "cpu", "--format", "f99", words=["f99", "tq4"], code=2)
        self.fails("bench", "step", "-n", 10, "--k", "f99", words=["f99", "tq4"], code=2)
        self.fails("bench", "step", "-n", 10, "--head-dim", 20, words=["head_dim", "20"], code=2)
        self.fails("bench", "echo", "-n", 1, "--bytes-in", "2MiB", words=["TOO_LARGE"])


class Replay(WithDaemon):
    def tearDown(self):
        """A replay leaves nothing behind, whatever became of it."""
        self.assertEqual([pool["name"] for pool in self.daemon.get("/v1/pools")["pools"]], ["demo", "exact"])
        self.assertEqual(self.daemon.get("/v1/sessions")["sessions"], [])

    def test_a_models_cache_goes_through_the_daemon(self):
        """The main job: outputs within their bounds, rows byte by byte, accounts that add up."""
        done = self.daemon.ctl("replay", CAPTURE, "--json")
        self.assertEqual(done.stderr, "", "no progress bar where nobody looks")
        answer = json.loads(done.stdout)
        self.assertTrue(answer["ok"], answer["failures"])
        self.assertEqual((answer["tokens"], answer["layers"], answer["k"], answer["v"]), (256, 3, "tq4", "tq4"))
        self.assertEqual([layer["layer"] for layer in answer["attention"]], [0, 18, 29])
        for layer in answer["attention"]:
            self.assertLess(layer["relative_error"], layer["relative_error_bound"])
            self.assertLess(layer["relative_error"], layer["relative_error_zero_keys"] / 2)
            self.assertLess(layer["relative_error_to_stored"], 1e-5)
            self.assertGreater(layer["cosine"], 0.95)
            self.assertEqual((layer["n_k_rows_differ"], layer["n_v_rows_differ"]), (0, 0))
        self.assertEqual(answer["bytes_per_token"], 3 * 3 * 2 * 36)
        self.assertAlmostEqual(answer["compression"], 2304 / 648, places=6)
        occupancy = answer["occupancy"]
        self.assertEqual(occupancy["before"], occupancy["after"])
        self.assertEqual(occupancy["during"]["stored_bytes"], 256 * 648)
        self.assertEqual(occupancy["during"]["blocks"]["owned"], 16)

    def test_as_text_with_other_formats(self):
        text = self.text("replay", CAPTURE, "--k", "bf16", "--v", "tq4", "--prefill", 250, "--chunk", 100,
                         "--block-size", 32)
        for word in ("ok ", "256 tokens", "prefill   250 tokens in chunks of 100", "rows/s", "p50", "p99", "zero keys",
                     "cosine",
                     "before", "during", "after"):
            self.assertIn(word, text)
        small = self.json("replay", self.file(Capture().bytes()), "--k", "f32", "--v", "f32")
        self.assertTrue(small["ok"])
        self.assertEqual([layer["layer"] for layer in small["attention"]], [0, 3])

    def test_damaged_captures_are_refused_with_the_place(self):
        whole = Capture().bytes()
        n_header = struct.unpack_from("<Q", whole)[0]

        def spoiled(change):
            capture = Capture()
            change(capture)
            return capture.bytes()

        def value(name, index, number):
            def change(capture):
                dtype, shape, data = capture.tensors[name]
                capture.tensors[name] = (dtype, shape,
                                         data[:4 * index] + struct.pack("<f", number) + data[4 * index + 4:])
            return change

        def shape(name, dims, dtype="F32"):
            def change(capture):
                n = dims[0] * dims[1] * dims[2] if len(dims) == 3 else dims[0] * dims[1]
                capture.tensors[name] = (dtype, dims, b"\0" * n * 4)
            return change

        cases = [
            (b"", ["empty"]),
            (whole[:5], ["5 bytes"]),
            (whole[:n_header // 2], ["header", str(n_header)]),
            (whole[:-1], ["tensor 'q.3'", "offset"]),
            (whole[:8 + n_header + 100], ["tensor 'k.0'", "offset"]),
            (whole + b"x", ["offset", "data bytes"]),
            (struct.pack("<Q", 1 << 60) + whole[8:], ["header", str(1 << 60)]),
            (struct.pack("<Q", 2) + b"{}", ["not a capture"]),
            (struct.pack("<Q", 2) + b"{!", ["line 1"]),
            (spoiled(value("k.3", 5, float("nan"))), ["tensor 'k.3'", "token 0, head 0, channel 5", "not finite"]),
            (spoiled(value("q.0", 35 * 16 + 2, float("inf"))), ["tensor 'q.0'", "token 17, head 1, channel 2"]),
            (spoiled(shape("v.3", [24, 1, 32])), ["tensor 'v.3'", "32"]),
            (spoiled(shape("k.3", [23, 1, 16])), ["tensor 'k.3'", "23"]),
            (spoiled(shape("q.0", [24, 16])), ["tensor 'q.0'", "2 dimensions"]),
            (spoiled(shape("q.0", [24, 2, 16], "I32")), ["tensor 'q.0'", "I32"]),
            (spoiled(lambda capture: capture.tensors.pop("v.0")), ["layer 0", "'v.0'"]),
            (spoiled(lambda capture: capture.tensors.pop("q.3")), ["layer 3", "'q.3'"]),
            (spoiled(lambda capture: capture.metadata.update(q_heads="5")), ["q_heads", "'5'"]),
            (spoiled(lambda capture: capture.metadata.update(model=7)), ["__metadata__", "model"]),
        ]
        for data, words in cases:
            with self.subTest(words=words):
                path = self.file(data)
                self.fails("replay", path, words=words)
                if not any("channel" in word for word in words):  # inspect shows rows that are not finite
                    self.fails("capture", "inspect", path, words=[str(path), *words])

    def test_formats_and_numbers_that_are_not_possible(self):
        self.fails("replay", CAPTURE, "--k", "f99", words=["--k", "f99", "tq4"], code=2)
        self.fails("replay", CAPTURE, "--block-size", 17, words=["block_size", "17"], code=2)
        self.fails("replay", "/nonexistent.safetensors", words=["/nonexistent.safetensors", "No such file"])
        self.fails("replay", self.files.name, words=[self.files.name])
        self.assertEqual(run("replay", CAPTURE, "--chunk", "x").returncode, 2)

    def test_inspect(self):
        text = self.text("capture", "inspect", CAPTURE)
        for word in ("SmolLM2-135M-Instruct", "k.29", "256 tokens", "BF16"):
            self.assertIn(word, text)
        answer = self.json("capture", "inspect", CAPTURE)
        self.assertEqual(len(answer["tensors"]), 9)

    def test_progress_is_for_terminals_only(self):
        """A bar on a terminal; not one byte of it when piped (above)."""
        main, terminal = pty.openpty()
        seen = bytearray()

        def read():
            try:
                while data := os.read(main, 4096):
                    seen.extend(data)
            except OSError:
                pass

        reader = threading.Thread(target=read)
        reader.start()
        done = subprocess.run([CTL, "--addr", self.daemon.addr, "--http", self.daemon.http, "replay", CAPTURE],
                              stdout=subprocess.PIPE, stderr=terminal, stdin=subprocess.DEVNULL, timeout=PATIENCE_S * 5,
                              text=True)
        os.close(terminal)
        reader.join(PATIENCE_S)
        os.close(main)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn(b"\r", bytes(seen))
        self.assertIn(b"%", bytes(seen))
        self.assertNotIn("\r", done.stdout)

    def test_an_interrupt_leaves_nothing(self):
        process = subprocess.Popen([CTL, "--addr", self.daemon.addr, "--http", self.daemon.http, "bench", "step",
                                    "-n", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(self.daemon.get("/v1/pools")["pools"]) < 3:
            self.assertIsNone(process.poll())
        process.send_signal(2)
        _, text = process.communicate(timeout=PATIENCE_S)
        self.assertEqual(process.returncode, 1)
        self.assertIn("interrupted", text)


class Tokens(unittest.TestCase):
    """A daemon that wants to know who asks, on both addresses."""

    TOKENS = {"data": "data-token-0123456789", "read": "read-token-0123456789", "admin": "admin-token-0123456789"}

    def test_each_command_needs_its_role(self):
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            files = {role: pathlib.Path(folder) / role for role in self.TOKENS}
            for role, path in files.items():
                path.write_text(self.TOKENS[role] + "\n")
            table = pathlib.Path(folder) / "tokens"
            table.write_text("".join(f"{role} {role}-name {token}\n" for role, token in self.TOKENS.items()))
            with Daemon("--pool", DEMO, "--tokens-file", table, token=self.TOKENS["admin"]) as daemon:
                # By TCP: on the Unix socket the kernel says who asks (unix_uids).
                where = ("--addr", daemon.tcp, "--http", daemon.http)
                for command, roles in ((["info"], ("read", "admin")), (["ping"], ("data", "admin")),
                                       (["replay", CAPTURE], ("admin",))):
                    done = run(*where, *command)
                    self.assertEqual(done.returncode, 1, command)
                    if command == ["info"]:
                        self.assertIn("a token; --token-file or TQKV_TOKEN has one for tqkvctl", done.stderr)
                    for role, path in files.items():
                        done = run(*where, "--token-file", path, *command)
                        self.assertEqual(done.returncode, 0 if role in roles else 1, (command, role, done.stderr))
                        self.assertNotIn(self.TOKENS[role], done.stdout + done.stderr)
                env = dict(os.environ, TQKV_TOKEN=self.TOKENS["read"])
                self.assertEqual(run(*where, "info", env=env).returncode, 0)
                # Health is everybody's to ask.
                self.assertEqual(run(*where, "ready").returncode, 0)


SPARE = {"name": "spare", "layers": 1, "q_heads": 1, "kv_heads": 1, "head_dim": 16, "k": "f32", "v": "f32", "block_size": 16,
         "blocks": 4}
SPARE_SHORT = "layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=4"


class Operators(unittest.TestCase):
    """What changes a daemon, by the names that the routes have."""

    def test_pools(self):
        with Daemon("--backend", "cpu") as daemon, tempfile.TemporaryDirectory() as folder:
            self.assertEqual(daemon.ctl("pools").stdout, "no pools\n")
            spec = pathlib.Path(folder, "spec.json")
            spec.write_text(json.dumps(dict(SPARE, name="of-a-file")))
            self.assertIn("spare", daemon.ctl("pools", "create", json.dumps(SPARE)).stdout)
            self.assertIn("of-a-file", daemon.ctl("pools", "create", spec).stdout)
            done = subprocess.run([BUILD / "server/tqkvctl", "--http", daemon.http, "pools", "create", "-"], text=True,
                                  input=json.dumps(dict(SPARE, name="of-stdin")), capture_output=True, timeout=PATIENCE_S)
            self.assertEqual(done.returncode, 0, done.stderr)
            rows = json.loads(daemon.ctl("pools", "--json").stdout)["pools"]
            self.assertEqual(sorted(row["name"] for row in rows), ["of-a-file", "of-stdin", "spare"])
            daemon.ctl("pools", "delete", "of-a-file")
            self.assertEqual(len(daemon.get("/v1/pools")["pools"]), 2)
            # As --pool takes it, and as plan prints it.
            self.assertIn("of-members", daemon.ctl("pools", "create", "name=of-members," + SPARE_SHORT).stdout)
            planned = daemon.ctl("plan", "--model", "smollm2-135m", "--context", 100, "--sessions", 3, "--preset", "k8v4").stdout
            planned = re.search(r"(?m)^pool +name=NAME,(.*)$", planned).group(1)
            daemon.ctl("pools", "create", "name=planned," + planned)
            pool = daemon.get("/v1/pools/planned")
            self.assertEqual((pool["layers"], pool["k"], pool["groups"][0]["n_blocks"]), (30, "fp8", 3 * 7))
            # Centres of a whole model are more than other routes take.
            spec.write_text(json.dumps(dict(SPARE, name="centred", layers=32, q_heads=8, kv_heads=8, head_dim=128, blocks=1,
                                            k_center=[[[0.123456] * 128] * 8] * 32)))
            self.assertGreater(spec.stat().st_size, 300000)
            self.assertIn("centred", daemon.ctl("pools", "create", spec).stdout)
            for args, code, words in [(["create", "{"], 1, ["line 1 column"]), (["create", "absent.json"], 1, ["absent.json"]),
                                      (["create", "{}"], 1, ["BAD_CONFIG", "name"]), (["create"], 2, ["SPEC"]),
                                      (["create", "name=x,layers"], 2, ["layers", "member=value"]),
                                      (["create", json.dumps(SPARE)], 1, ["EXISTS"]), (["delete", "none"], 1, ["NOT_FOUND"]),
                                      (["delete", "../info"], 2, ["'../info'"]), (["delete", "a/b"], 2, ["'a/b'"])]:
                done = daemon.ctl("pools", *args, check=False)
                self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (code, "", 1), done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)

    def test_sessions_prefixes_and_connections(self):
        with Daemon("--backend", "cpu", "--pool", EXACT) as daemon, tqkv.Client(daemon.addr, name="me") as client:
            session = client.open("exact", "mine")
            rows = np.ones((2, 32, 2, 32), np.float32)
            session.append_layers(1, rows, rows)
            session.publish(1, list(range(32)))
            self.assertIn("me", daemon.ctl("connections").stdout)
            prefix = json.loads(daemon.ctl("prefixes", "--json").stdout)["prefixes"][0]["id"]
            daemon.ctl("prefixes", "delete", prefix)
            self.assertRegex(daemon.ctl("prefixes").stdout, r"\Ano prefixes\n\npool .* removed\nexact .* 2\n\Z")
            client.open("exact", "other")
            daemon.ctl("sessions", "close", "other")
            daemon.ctl("sessions", "close", json.loads(daemon.ctl("sessions", "--json").stdout)["sessions"][0]["id"])
            self.assertEqual(daemon.ctl("sessions").stdout, "no sessions\n")
            with self.assertRaisesRegex(tqkv.TqkvError, "STALE_HANDLE"):
                session.lengths()
            for args, code in ((["sessions", "close", "mine"], 2), (["sessions", "close", "00ab000000000001"], 1),
                               (["prefixes", "delete", prefix], 1), (["prefixes", "delete", "x"], 2)):
                self.assertEqual(daemon.ctl(*args, check=False).returncode, code, args)

    def test_the_daemon_as_a_whole(self):
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder, "tqkvd.json")
            config.write_text("{}")
            with Daemon("--backend", "cpu", "--pool", EXACT, "--config", config, "--snapshot-dir", folder) as daemon:
                self.assertEqual(daemon.ctl("reload").stdout, "nothing has changed\n")
                config.write_text(json.dumps({"io_timeout_ms": 777, "large_slots": 5}))
                self.assertEqual(daemon.ctl("reload").stdout,
                                 "changed: io_timeout_ms\nkeeps its value until a restart: large_slots\n")
                config.write_text("{")
                done = daemon.ctl("reload", check=False)
                self.assertEqual(done.returncode, 1)
                self.assertIn("BAD_CONFIG", done.stderr)
                self.assertEqual((daemon.ctl("log-level", "error").stdout, daemon.ctl("log-level").stdout), ("error\n",) * 2)
                self.assertIn("loud", daemon.ctl("log-level", "loud", check=False).stderr)
                self.assertRegex(daemon.ctl("audit").stdout, "^clean: ")
                self.assertRegex(daemon.ctl("self-test").stdout, "^passed in ")
                self.assertEqual(daemon.ctl("snapshots").stdout, "no snapshots\n")
                with tqkv.Client(daemon.addr) as client, client.open("exact", "mine"):
                    for name in ("one", "two"):
                        daemon.ctl("snapshot", name)
                pathlib.Path(folder, ".hidden.tqkv").write_text("")
                pathlib.Path(folder, "link.tqkv").symlink_to(config)
                rows = json.loads(daemon.ctl("snapshots", "--json").stdout)
                self.assertEqual((rows["n_snapshots"], sorted(row["name"] for row in rows["snapshots"])), (2, ["one", "two"]))
                for row in rows["snapshots"]:
                    told = pathlib.Path(folder, row["name"] + ".tqkv").stat()
                    self.assertEqual((row["n_bytes"], row["modified_unix_s"]), (told.st_size, int(told.st_mtime)))
                self.assertRegex(daemon.ctl("snapshots").stdout, r"(?m)^one +\d.* UTC$")
                daemon.ctl("snapshots", "delete", "one")
                self.assertFalse(pathlib.Path(folder, "one.tqkv").exists())
                for name, code in (("one", 1), ("../one", 2), (".hidden", 2)):
                    self.assertEqual(daemon.ctl("snapshots", "delete", name, check=False).returncode, code, name)
                self.assertRegex(daemon.ctl("drain").stdout, "^draining: 0 sessions")
                self.assertEqual(daemon.process.wait(PATIENCE_S), 0)

    def test_tenants_by_name(self):
        """A tenant of the Unix socket is a user; what is none of this says what a tenant is."""
        with Daemon("--backend", "cpu") as daemon:
            daemon.ctl("tenants", "set", "root", "--weight", "3")
            self.assertEqual(daemon.get("/v1/tenants/0")["weight"], 3)
            daemon.ctl("tenants", "clear", "root")
            done = daemon.ctl("tenants", "set", "no-such-user", check=False)
            self.assertEqual(done.returncode, 2)
            self.assertIn("the user id of a client on the Unix socket", done.stderr)


class CommandLine(unittest.TestCase):
    def commands(self):
        text = run("--help").stdout
        listed = re.search(r"commands:\n(.*?)\n\n", text, re.S).group(1)
        return [re.match(r"  ((?:[a-z-]+ ?)+?)(?: [A-Z\[]|\s\s)", line).group(1).strip() for line in listed.splitlines()]

    def test_every_command_explains_itself(self):
        commands = self.commands()
        for name in ("ping", "info", "occupancy", "sessions", "replay", "bench echo", "bench step", "capture inspect"):
            self.assertIn(name, commands)
        for name in commands:
            for flag in ("--help", "-h"):
                done = run(*name.split(), flag)
                self.assertEqual((done.returncode, done.stderr), (0, ""), name)
                self.assertTrue(done.stdout.startswith(f"usage: tqkvctl [options] {name}"), done.stdout)
                for word in ("--addr", "--http", "--json", "--timeout-ms"):
                    self.assertIn(word, done.stdout)
        self.assertRegex(run("--version").stdout, r"^tqkvctl \d+\.\d+\.\d+, commit \S+\n$")

    def test_help_is_no_mistake(self):
        """Of the program, of a command by either order of words, and of the first word of several commands; in 110 columns."""
        for args, words in [(["help"], ["usage: tqkvctl", "bench echo"]), (["bench", "--help"], ["bench echo", "bench cpu"]),
                            (["codec", "-h"], ["codec info"]), (["capture", "--help"], ["capture inspect"]),
                            (["help", "bench"], ["bench step"]), (["help", "bench", "cpu"], ["--threads"]),
                            (["tenants", "--help"], ["See also: 'tqkvctl tenants set', 'tqkvctl tenants clear'"])]:
            with self.subTest(args=args):
                done = run(*args)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                for word in words:
                    self.assertIn(word, done.stdout)
        self.assertNotIn("ping", run("bench", "--help").stdout)
        for name in self.commands():
            for line in run(*name.split(), "--help").stdout.splitlines():
                self.assertLessEqual(len(line), 110, line)

    def test_wrong_command_lines_exit_2_with_advice(self):
        for args, words in [
            ([], ["no command", "tqkvctl --help"]), (["frobnicate"], ["'frobnicate'", "tqkvctl --help"]),
            (["bench"], ["'bench echo'", "'bench step'"]), (["capture", "eat"], ["'capture inspect'"]),
            (["ping", "--nope"], ["'--nope'", "tqkvctl ping --help"]),
            (["ping", "more"], ["'more'", "tqkvctl ping --help"]),
            (["ping", "-n"], ["'-n'", "N"]), (["ping", "-n", "0"], ["--count", "'0'", "1"]),
            (["ping", "-n", "9x"], ["'9x'"]),
            (["replay"], ["FILE", "tqkvctl replay --help"]), (["ping", "--json=1"], ["--json"]),
            (["--addr"], ["'--addr'", "ADDRESS"]),
            (["bench", "echo", "--bytes-in", "1TB"], ["--bytes-in", "'1TB'"]),
            (["ping", "--timeout-ms", "-1"], ["--timeout-ms"]),
            (["--http", "banana", "info"], ["--http", "banana", "HOST:PORT"]),
            (["--http", "127.0.0.1:99999", "info"], ["--http", "99999", "65535"]),
            (["--http", "127.0.0.1:0", "info"], ["--http", "65535"]),
            (["--http", "https://127.0.0.1", "info"], ["--http", "https://HOST:PORT"]),
            (["tenants", "set", "7", "--bytes", "1xb"], ["--bytes", "'1xb'", "KiB, MiB or GiB"]),
        ]:
            with self.subTest(args=args):
                done = run(*args)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1)
                for word in words:
                    self.assertIn(word, done.stderr)

    def test_addresses_where_nobody_is(self):
        with tempfile.TemporaryDirectory() as folder:
            for args, words in [
                (["--addr", f"unix:{folder}/s", "ping"], [f"unix:{folder}/s", "No such file"]),
                (["--addr", "tcp:127.0.0.1:1", "ping"], ["tcp:127.0.0.1:1", "refused"]),
                (["--addr", "banana", "ping"], ["banana", "unix:/path"]),
                (["--addr", "tcp:127.0.0.1", "ping"], ["tcp:127.0.0.1"]),
                (["--addr", f"unix:{folder}/{'x' * 200}", "ping"], ["x" * 50]),
                (["--http", "127.0.0.1:1", "info"], ["127.0.0.1:1", "refused"]),
                (["--http", "127.0.0.1:1", "ready"], ["127.0.0.1:1", "refused"]),
                (["--http", "127.0.0.1:1", "occupancy"], ["127.0.0.1:1"]),
                (["--http", "127.0.0.1:1", "sessions"], ["127.0.0.1:1"]),
                (["--http", "127.0.0.1:1", "replay", CAPTURE], ["127.0.0.1:1"]),
                (["--addr", f"unix:{folder}/s", "bench", "echo"], [f"unix:{folder}/s"]),
            ]:
                with self.subTest(args=args):
                    done = run(*args)
                    self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
                    self.assertEqual(done.stderr.count("\n"), 1)
                    for word in words:
                        self.assertIn(word, done.stderr)

    def test_something_else_answers(self):
        """The two addresses exchanged: the end is a sentence, at the latest after --timeout-ms."""
        with Daemon("--pool", DEMO) as daemon:
            done = run("--addr", f"tcp:{daemon.http}", "--timeout-ms", "1000", "ping")
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(daemon.http, done.stderr)
            done = run("--http", daemon.tcp[4:], "--timeout-ms", "3000", "info")
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(daemon.tcp[4:], done.stderr)


class Json(unittest.TestCase):
    """Every command prints JSON with --json, one value or one a line, and the exit code is that of the text form."""

    # Words of a command as --help lists it -> what to run; {folder} is a place to write to. None: has tests of its own above
    # or in test_codec and test_explain, with --json, or takes too long here.
    CALLS = {
        "ping": ["ping", "--count", "3"], "ready": ["ready"], "info": ["info"], "occupancy": ["occupancy"],
        "sessions [ID]": ["sessions"], "connections": ["connections"], "pools": ["pools"], "snapshots": ["snapshots"],
        "pools create SPEC": ["pools", "create", json.dumps(SPARE)], "pools delete NAME": ["pools", "delete", "spare"],
        "reload": ["reload"], "log-level [LEVEL]": ["log-level", "info"], "audit": ["audit"], "self-test": ["self-test"],
        "snapshots delete NAME": ["snapshots", "delete", "one"], "drain": None, "sessions close ID": None, "prefixes delete ID": None,
        "prefixes": ["prefixes"], "tenants set TENANT": ["tenants", "set", "7", "--weight", "2"], "tenants": ["tenants"],
        "tenants clear TENANT": ["tenants", "clear", "7"], "snapshot NAME": ["snapshot", "one"], "restore NAME": ["restore", "one"],
        "top": ["top", "--count", "1"], "plan": ["plan", "--model", "llama-3.1-8b"], "presets": ["presets"],
        "capture inspect FILE": ["capture", "inspect", str(CAPTURE)],
        "codec info": ["codec", "info", "--format", "tq4", "--head-dim", "64"],
        "codec codebook": ["codec", "codebook", "--head-dim", "64", "--bits", "4"],
        "bench echo": ["bench", "echo", "--count", "3"], "bench step": ["bench", "step", "--count", "10"],
        "replay FILE": ["replay", str(CAPTURE)],
        "attention CAPTURE": ["attention", "--explain", str(CAPTURE), "--layer", "18", "--token", "20"],
        "bench ingest": None, "bench cpu": None, "bench kernels": None, "calibrate CAPTURE": None, "codec encode IN.f32 OUT.rows": None,
        "codec decode IN.rows OUT.f32": None, "codec rotation OUT.f32": None, "codec compare FILE": None,
    }

    def test_every_command(self):
        with tempfile.TemporaryDirectory() as folder, Daemon("--backend", "cpu", "--pool", DEMO, "--snapshot-dir", folder) as daemon:
            listed = re.search(r"commands:\n(.*?)\n\n", daemon.ctl("--help").stdout, re.S).group(1).splitlines()
            listed = [re.match(r"  (\S.*?)\s{2,}", line).group(1) for line in listed]
            self.assertEqual(sorted(listed), sorted(self.CALLS))
            # What is deleted has to be there, and listed by others before.
            listed.sort(key=lambda name: ("delete" in name, name.startswith("restore")))
            for name in listed:
                if not self.CALLS[name]:
                    continue
                with self.subTest(name):
                    done = daemon.ctl(*self.CALLS[name], "--json", check=False)
                    self.assertEqual((done.returncode, done.stderr), (0, ""))
                    try:
                        json.loads(done.stdout)
                    except ValueError:
                        for line in done.stdout.splitlines():
                            json.loads(line)
                    self.assertTrue(done.stdout.endswith("\n"))


if __name__ == "__main__":
    unittest.main()
