"""The offline codec: golden rows through the command line, round trips, bad files, large files. No daemon."""

import errno
import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import numpy as np
import tqkv
from daemon import IS_SANITIZED

ROOT = pathlib.Path(os.environ.get("KV_SOURCE_ROOT") or pathlib.Path(__file__).resolve().parents[2])
ROWS = ROOT / "tests/golden/rows"
CTL = os.path.join(os.environ["TQKV_BUILD"], "server/tqkvctl")
TQKVD = os.path.join(os.environ["TQKV_BUILD"], "server/tqkvd")
SMOLLM = ROOT / "tests/golden/captures/smollm2-135m-l0-l18-l29.safetensors"


def fnv(data):
    """FNV-1a, 64 bits."""
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return f"{state:016x}"


class Codec(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name, data=None):
        path = os.path.join(self.folder.name, name)
        if data is not None:
            pathlib.Path(path).write_bytes(data.tobytes() if isinstance(data, np.ndarray) else data)
        return path

    def names(self):
        return sorted(os.listdir(self.folder.name))

    def call(self, *args, **options):
        return subprocess.run([CTL, *map(str, args)], capture_output=True, text=True, timeout=120, check=False,
                              **options)

    def ctl(self, *args):
        done = self.call(*args)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def refused(self, code, text, *args):
        """The command fails with this exit code and says this, in one line."""
        done = self.call(*args)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        self.assertIn(text, done.stderr)
        self.assertEqual(done.stderr.count("\n"), 1)

    def bytes_of(self, name):
        return pathlib.Path(self.path(name)).read_bytes()

    def normals(self, n, d, seed=5):
        return np.random.default_rng(seed).standard_normal((n, d), np.float32)


class Golden(Codec):
    def cases(self):
        """(fields of the case, accepted input rows, their encoded bytes)"""
        at = dict.fromkeys((16, 64, 80, 96, 128, 192, 256), 0)
        encoded = {d: (ROWS / f"encoded_d{d}.rows").read_bytes() for d in at}
        for line in (ROWS / "cases.txt").read_text().splitlines():
            fields = line.split(" ")
            d, row_bytes, refused = int(fields[0]), int(fields[6]), fields[7]
            rows = np.fromfile(ROWS / f"inputs_d{d}.f32", "<f4").reshape(-1, d)
            self.assertEqual(len(rows), len(refused))
            kept = rows[[c == "." for c in refused]]
            if fields[1] == "f32":
                yield fields, kept, kept.tobytes()
                continue
            n_bytes = len(kept) * row_bytes
            yield fields, kept, encoded[d][at[d]:at[d] + n_bytes]
            at[d] += n_bytes
        self.assertEqual(at, {d: len(data) for d, data in encoded.items()})

    def options(self, fields):
        d, name, rotation, group, norm_correction, channels = fields[:6]
        options = ["--format", name, "--head-dim", d, "--seed", 42]
        if rotation != "-":
            options += ["--rotation", rotation]
        if group != "0":
            options += ["--group", group]
        if norm_correction == "1":
            options.append("--norm-correction")
        if channels != "-":
            options += ["--high-channels", self.path("channels", channels.encode())]
        return options

    def test_every_case_gives_the_reference_bytes(self):
        """Encoding gives the bytes of the independent implementation, decoding the hash of its numbers."""
        n_cases = 0
        for fields, rows, encoded in self.cases():
            with self.subTest(case=fields[:6]):
                options = self.options(fields)
                self.ctl("codec", "encode", *options, self.path("in.f32", rows), self.path("out.rows"))
                self.assertEqual(self.bytes_of("out.rows"), encoded)
                self.ctl("codec", "decode", *options, self.path("out.rows"), self.path("out.f32"))
                self.assertEqual(fnv(self.bytes_of("out.f32")), fields[8])
                if fields[9] != "-":
                    self.ctl("codec", "decode", *options, "--recipe-scale", "published", self.path("out.rows"),
                             self.path("out.f32"))
                    self.assertEqual(fnv(self.bytes_of("out.f32")), fields[9])
                info = json.loads(self.ctl("codec", "info", *options, "--json"))
                self.assertEqual(info["row_bytes"], int(fields[6]))
                self.assertEqual(sum(part["bytes"] for part in info["parts"]), info["row_bytes"])
                self.assertEqual(sum(info["account"].values()), info["row_bytes"])
                n_cases += 1
        self.assertGreater(n_cases, 200)

    def test_refused_rows_are_named(self):
        """A row that the reference refuses ends the command, with its number and offset; nothing is left."""
        seen = set()
        for fields, _, _ in self.cases():
            d, name, refused = int(fields[0]), fields[1], fields[7]
            if "R" not in refused or (d, name) in seen or d not in (64, 80):
                continue
            seen.add((d, name))
            row = refused.index("R")
            self.refused(1, f"inputs_d{d}.f32: row {row} (offset {row * 4 * d}): ", "codec", "encode",
                         *self.options(fields), ROWS / f"inputs_d{d}.f32", self.path("out.rows"))
            self.assertNotIn("out.rows", self.names())
        self.assertGreater(len(seen), 10)

    def test_rotations(self):
        """Matrices equal the reference's bit for bit; a matrix from a file encodes as the one it was made from."""
        for line in (ROWS / "rotations.txt").read_text().splitlines():
            kind, d, seed, expected = line.split(" ")
            self.ctl("codec", "rotation", "--rotation", kind, "--head-dim", d, "--seed", seed, self.path("m.f32"))
            self.assertEqual(fnv(self.bytes_of("m.f32")), expected)
        self.path("in.f32", self.normals(50, 80))
        self.ctl("codec", "rotation", "--head-dim", 80, "--seed", 9, self.path("m.f32"))
        for name, options in (("a", ("--seed", 9)), ("b", ("--rotation", "file:" + self.path("m.f32")))):
            self.ctl("codec", "encode", "--format", "tq4", "--head-dim", 80, *options, self.path("in.f32"),
                     self.path(name))
        self.assertEqual(self.bytes_of("a"), self.bytes_of("b"))

    def test_projection_from_a_file(self):
        """The qr matrix of seed + 1000 is the projection of tqpN where the dimension is no power of two."""
        self.path("in.f32", self.normals(50, 96))
        self.ctl("codec", "rotation", "--rotation", "qr", "--head-dim", 96, "--seed", 1042, self.path("s.f32"))
        scaled = np.fromfile(self.path("s.f32"), "<f4") * np.float32(np.sqrt(96))
        self.path("s.f32", scaled)
        for name, options in (("a", ()), ("b", ("--projection", "file:" + self.path("s.f32")))):
            self.ctl("codec", "encode", "--format", "tqp3", "--head-dim", 96, *options, self.path("in.f32"),
                     self.path(name))
        self.assertEqual(self.bytes_of("a"), self.bytes_of("b"))


class Books(Codec):
    def test_the_printed_codebook_is_the_exact_one(self):
        """Within 1e-9 of the 40-digit table, and as float32 the same; any other dimension is solved as well."""
        table = json.loads((ROOT / "tests/golden/exact_codebooks.json").read_text())
        for entry in table[::11]:
            book = json.loads(self.ctl("codec", "codebook", "--head-dim", entry["d"], "--bits", entry["bits"]))
            half = np.array([float(text) for text in entry["positive_centroids"]])
            exact = np.concatenate((-half[::-1], half))
            self.assertLess(np.abs(np.array(book["centroids"]) - exact).max(), 1e-9)
            self.assertTrue(np.array_equal(np.float32(book["centroids"]), exact.astype(np.float32)))
            self.assertEqual(len(book["boundaries"]), 2 ** entry["bits"] + 1)
        self.assertEqual(json.loads(self.ctl("codec", "codebook", "--head-dim", 37, "--bits", 3))["d"], 37)

    def test_an_own_codebook_is_used(self):
        """The printed codebook gives the same bytes as the built-in one; another one gives others."""
        self.path("in.f32", self.normals(20, 64))
        book = json.loads(self.ctl("codec", "codebook", "--head-dim", 64, "--bits", 2))
        self.path("same.json", json.dumps(book).encode())
        book["centroids"] = [0.9 * c for c in book["centroids"]]
        self.path("other.json", json.dumps(book).encode())
        encode = ("codec", "encode", "--format", "tq2", "--head-dim", 64)
        self.ctl(*encode, self.path("in.f32"), self.path("a"))
        self.ctl(*encode, "--codebook", self.path("same.json"), self.path("in.f32"), self.path("b"))
        self.assertEqual(self.bytes_of("a"), self.bytes_of("b"))
        decode = ("codec", "decode", "--format", "tq2", "--head-dim", 64)
        self.ctl(*decode, self.path("a"), self.path("c"))
        self.ctl(*decode, "--codebook", self.path("other.json"), self.path("a"), self.path("d"))
        self.assertNotEqual(self.bytes_of("c"), self.bytes_of("d"))
        book["centroids"][0] = 7
        self.path("other.json", json.dumps(book).encode())
        self.refused(1, "other.json: codebook:", *encode, "--codebook", self.path("other.json"), self.path("in.f32"),
                     self.path("b"))

    def test_theory(self):
        """The expected error that info prints is the one that rows have."""
        self.path("in.f32", self.normals(4000, 128))
        for name in ("tq1", "tq4", "tqp3", "turboquant25", "turboquant35"):
            options = ("--format", name, "--head-dim", 128)
            expected = json.loads(self.ctl("codec", "info", *options, "--json"))["expected_error"]
            compared = json.loads(self.ctl("codec", "compare", *options, self.path("in.f32"), "--json"))
            self.assertAlmostEqual(compared["results"][0]["error"] / expected, 1, delta=0.02)


class BadFiles(Codec):
    TQ4 = ("--format", "tq4", "--head-dim", "64")  # 36 bytes a row: 32 of indices, the norm

    def packed(self, n=10):
        self.path("in.f32", self.normals(n, 64))
        self.ctl("codec", "encode", *self.TQ4, self.path("in.f32"), self.path("in.rows"))
        return bytearray(self.bytes_of("in.rows"))

    def refused_encode(self, text, data):
        self.refused(1, text, "codec", "encode", *self.TQ4, self.path("bad.f32", data), self.path("out"))
        self.assertEqual(self.names(), ["bad.f32"])
        os.unlink(self.path("bad.f32"))

    def refused_decode(self, text, data):
        self.path("in.rows", bytes(data))
        self.refused(1, text, "codec", "decode", *self.TQ4, self.path("in.rows"), self.path("out"))
        self.assertEqual(self.names(), ["in.f32", "in.rows"])

    def test_offsets_of_bad_numbers(self):
        rows = self.normals(3000, 64)
        rows[2777, 5] = np.nan
        self.refused_encode(f"bad.f32: row 2777 (offset {2777 * 256}): channel 5 (offset {2777 * 256 + 20}) is nan",
                            rows)
        rows[2777, 5] = -np.inf
        self.refused_encode("channel 5 (offset 710932) is -inf", rows)
        rows[2777, 5] = 3e38
        rows[2777, 6] = 3e38
        self.refused_encode("row 2777 (offset 710912): tq4 cannot hold its values; the largest is 3e+38 in channel 5",
                            rows)

    def test_files_that_end_within_a_row(self):
        self.refused_encode("bad.f32: the file ends within row 3: 13 bytes at offset 768, a row has 256",
                            bytes(3 * 256 + 13))
        data = self.packed()
        self.refused_decode("in.rows: the file ends within row 9: 35 bytes at offset 324, a row has 36", data[:-1])

    def test_a_pipe_that_ends_within_a_row(self):
        done = subprocess.run([CTL, "codec", "encode", *self.TQ4, "/dev/stdin", self.path("out")], input=bytes(1000),
                              capture_output=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"/dev/stdin: the file ends within row 3: 232 bytes at offset 768", done.stderr)
        self.assertEqual(self.names(), [])

    def test_bad_packed_rows(self):
        good = self.packed()
        for value, shown in ((-1.0, "-1"), (np.nan, "nan"), (np.inf, "inf")):
            data = bytearray(good)
            data[7 * 36 + 32:8 * 36] = np.float32(value).tobytes()
            self.refused_decode(f"in.rows: row 7 (offset 252): norm (offset 284) is {shown}", data)
        self.path("in.rows", bytes(good))
        self.ctl("codec", "decode", *self.TQ4, self.path("in.rows"), self.path("out"))

    def test_bits_behind_the_last_code(self):
        """A group of 20 channels of 4 bits, four times: 16 codes of padding in the last one."""
        options = ("--format", "v4", "--head-dim", "64", "--group", "20")
        self.path("in.f32", self.normals(2, 64))
        self.ctl("codec", "encode", *options, self.path("in.f32"), self.path("in.rows"))
        data = bytearray(self.bytes_of("in.rows"))
        data[len(data) // 2 + 39] |= 0x80
        self.path("in.rows", bytes(data))
        self.refused(1, "row 1 (offset 56): bits behind the last code are not 0", "codec", "decode", *options,
                     self.path("in.rows"), self.path("out"))

    def test_the_input_is_not_overwritten(self):
        data = self.packed()
        os.link(self.path("in.rows"), self.path("other"))
        os.symlink(self.path("in.rows"), self.path("link"))
        for out in ("in.rows", "other", "link"):
            self.refused(1, f"{out}: the output is the input", "codec", "decode", *self.TQ4, self.path("in.rows"),
                         self.path(out))
        self.ctl("codec", "rotation", "--head-dim", 64, self.path("m.f32"))
        self.refused(1, "m.f32: the output is the input", "codec", "encode", *self.TQ4, "--rotation",
                     "file:" + self.path("m.f32"), self.path("in.f32"), self.path("m.f32"))
        self.assertEqual(self.bytes_of("in.rows"), data)

    def test_what_stood_there_stays_on_failure(self):
        """An older output is replaced by a whole one only; links keep pointing where they pointed."""
        self.packed()
        self.path("out", b"old")
        os.symlink("out", self.path("link"))
        self.path("bad.f32", bytes(100))
        self.refused(1, "the file ends within row 0", "codec", "encode", *self.TQ4, self.path("bad.f32"),
                     self.path("out"))
        self.assertEqual(self.bytes_of("out"), b"old")
        self.ctl("codec", "encode", *self.TQ4, self.path("in.f32"), self.path("link"))
        self.assertTrue(os.path.islink(self.path("link")))
        self.assertEqual(self.bytes_of("out"), self.bytes_of("in.rows"))
        self.assertEqual(self.names(), ["bad.f32", "in.f32", "in.rows", "link", "out"])

    def test_places_that_cannot_be_written(self):
        self.packed()
        encode = ("codec", "encode", *self.TQ4, self.path("in.f32"))
        self.refused(1, "No such file or directory", *encode, self.path("nowhere/out"))
        self.refused(1, "Is a directory", *encode, self.folder.name)
        self.refused(1, "No space left on device", *encode, "/dev/full")
        self.refused(1, "missing.f32: No such file or directory", "codec", "encode", *self.TQ4,
                     self.path("missing.f32"),
                     self.path("out"))
        self.refused(1, "Is a directory", "codec", "encode", *self.TQ4, self.folder.name, self.path("out"))

    def test_a_full_disk_leaves_nothing(self):
        """The file size limit stands for a full disk."""
        self.path("in.f32", self.normals(20000, 64))
        done = self.call("codec", "encode", *self.TQ4, self.path("in.f32"), self.path("out"),
                         preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                                             resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))))
        self.assertEqual(done.returncode, 1)
        self.assertIn("out: File too large", done.stderr)
        self.assertEqual(self.names(), ["in.f32"])

    def test_wrong_command_lines(self):
        encode = ("codec", "encode", self.path("in.f32", bytes(256)), self.path("out"))
        for text, *options in (
            ("--format is missing", "--head-dim", "64"),
            ("--head-dim is missing", "--format", "tq4"),
            ("unknown row format \"tq9\"", "--format", "tq9", "--head-dim", "64"),
            ("--head-dim: 40 is not a multiple of 16", "--format", "tq4", "--head-dim", "40"),
            ("'512' is not a number of 16 to 256", "--format", "tq4", "--head-dim", "512"),
            ("takes no group", *self.TQ4, "--group", "32"),
            ("takes no norm_correction", "--format", "v4", "--head-dim", "64", "--norm-correction"),
            ("--rotation", "--format", "tq4", "--head-dim", "80", "--rotation", "rht"),
            ("'file' needs a path", *self.TQ4, "--rotation", "file"),
            ("is not file:S.f32", "--format", "tqp4", "--head-dim", "64", "--projection", "s.f32"),
            ("unknown recipe scale", "--format", "turboquant35", "--head-dim", "64", "--recipe-scale", "x"),
        ):
            self.refused(2, text, *encode, *options)
        self.refused(2, "IN.f32 OUT.rows is missing", "codec", "encode", *self.TQ4, "a")
        self.refused(2, "one argument too many", "codec", "encode", *self.TQ4, "a", "b", "c")
        self.refused(2, "'codec' needs one of: 'codec info', 'codec encode'", "codec")

    def test_bad_option_files(self):
        in_f32, out = self.path("in.f32", self.normals(2, 64)), self.path("out")
        recipe = ("codec", "encode", "--format", "turboquant35", "--head-dim", "64", in_f32, out, "--high-channels")
        channels = list(range(0, 64, 2))
        for text, code, data in (
            ("channels: offset 3: expected a channel number", 1, b"0, x"),
            ("channels: offset 2: expected a channel number below 256", 1, b"1 256"),
            ("31 high channels instead of 32", 2, " ".join(map(str, channels[1:])).encode()),
            ("high channels do not ascend: 4 is followed by 2", 2, json.dumps([0, 4, 2] + channels[3:]).encode()),
        ):
            self.refused(code, text, *recipe, self.path("channels", data))
        self.ctl(*recipe, self.path("channels", json.dumps(channels, indent=1).encode()))
        matrix = np.eye(64, dtype=np.float32)
        encode = ("codec", "encode", *self.TQ4, in_f32, out, "--rotation", "file:" + self.path("m.f32"))
        self.path("m.f32", matrix[:63])
        self.refused(1, "m.f32: 16128 bytes, a matrix of 64 rows of 64 float32 has 16384", *encode)
        matrix[3, 4] = np.inf
        self.path("m.f32", matrix)
        self.refused(1, "m.f32: row 3, column 4 (offset 784) is inf", *encode)
        matrix[3, 4] = 0.5
        self.path("m.f32", matrix)
        self.refused(1, "m.f32: ", *encode)
        matrix[3, 4] = 0
        self.path("m.f32", matrix)
        self.ctl(*encode)

    def test_an_empty_file_has_no_rows(self):
        self.assertEqual(json.loads(self.ctl("codec", "encode", *self.TQ4, self.path("in.f32", b""), self.path("out"),
                                             "--json")), {"rows": 0, "in_bytes": 0, "out_bytes": 0})
        self.assertEqual(self.bytes_of("out"), b"")


class Large(Codec):
    @unittest.skipIf(IS_SANITIZED, "a sanitizer's shadow memory is larger than the limit")
    def test_memory_does_not_grow_with_the_file(self):
        """400 MB of rows (a sparse file of zeros with a real end) under a limit of 128 MiB of address space."""
        n, d = 400000, 256
        with open(self.path("in.f32"), "wb") as file:
            file.truncate((n - 3) * 4 * d)
            file.seek(0, os.SEEK_END)
            file.write(self.normals(3, d).tobytes())
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (128 << 20, 128 << 20))
        options = ("--format", "v4", "--head-dim", d)
        done = self.call("codec", "encode", *options, self.path("in.f32"), self.path("out.rows"), preexec_fn=limit)
        self.assertEqual((done.returncode, done.stderr), (0, ""))  # no bar: this is no terminal
        self.assertEqual(os.path.getsize(self.path("out.rows")), n * 160)
        with open(self.path("out.rows"), "rb") as file:
            file.seek((n - 3) * 160)
            self.path("end.rows", file.read())
        self.ctl("codec", "decode", *options, self.path("end.rows"), self.path("end.f32"))
        got = np.fromfile(self.path("end.f32"), "<f4").reshape(3, d)
        self.assertLess(np.abs(got - self.normals(3, d)).max(), 0.4)

    def test_an_interrupt_leaves_nothing(self):
        with open(self.path("in.f32"), "wb") as file:
            file.truncate(4 << 30)
        process = subprocess.Popen([CTL, "codec", "encode", "--format", "tq8", "--head-dim", "256", self.path("in.f32"),
                                    self.path("out")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 30
        while len(self.names()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 1)
        self.assertIn("interrupted after", stderr)
        self.assertEqual(self.names(), ["in.f32"])

    def test_a_bar_on_a_terminal_only(self):
        """Standard error is a terminal: a bar is drawn and erased again."""
        with open(self.path("in.f32"), "wb") as file:
            file.truncate(128 << 20)
        master, slave = os.openpty()
        with open(slave, "wb") as terminal:
            subprocess.run([CTL, "codec", "encode", "--format", "tq4", "--head-dim", "128", self.path("in.f32"),
                            self.path("out")], stdout=subprocess.DEVNULL, stderr=terminal, timeout=120, check=True,
                           env={**os.environ, "TERM": "xterm"})
        drawn = b""
        while True:  # a slow program draws more than one read gives; the closed end of a terminal says EIO
            try:
                drawn += os.read(master, 1 << 16)
            except OSError as error:
                self.assertEqual(error.errno, errno.EIO)
                break
        os.close(master)
        self.assertIn(b"encode   [", drawn)
        self.assertIn(b"rows/s", drawn)
        self.assertTrue(drawn.endswith(b"\r\x1b[K"))

    def test_a_pipe_works(self):
        rows = self.normals(1000, 64)
        done = subprocess.run([CTL, "codec", "encode", "--format", "bf16", "--head-dim", "64", "/dev/stdin",
                               "/dev/stdout"],
                              input=rows.tobytes(), capture_output=True, timeout=60, check=True)
        self.assertEqual(len(done.stdout), 1000 * 128)
        got = (np.frombuffer(done.stdout, "<u2").astype(np.uint32) << 16).view(np.float32)
        self.assertLess(np.abs(got / rows.ravel() - 1).max(), 2.0**-8)


class Compare(Codec):
    def compare(self, rows, formats, *options):
        n, d = rows.shape
        return json.loads(self.ctl("codec", "compare", "--format", formats, "--head-dim", d, self.path("k.f32", rows),
                                   "--json", *options))

    def test_biased_keys_collapse_at_four_bits(self):
        """K6: a large constant part in some channels. The relative error hides it, the controls and weights do not."""
        bias = np.zeros(128, np.float32)
        bias[[5, 17, 40, 77, 101, 120]] = (60, -45, 80, 35, -70, 50)
        got = self.compare(self.normals(1024, 128) + bias, "4bit,3bit,tq8,k8v4")
        by_name = {row["name"].split(" ")[0]: row for row in got["results"]}
        zeros, noise = got["results"][-2:]
        self.assertEqual((zeros["name"], noise["name"]), ("rows of zeros", "random rows"))
        self.assertLess(by_name["4bit"]["error"], 0.011)
        self.assertGreater(by_name["4bit"]["cosine"], 0.99)  # looks well
        self.assertGreater(by_name["4bit"]["part_error"], 1)  # and is lost
        self.assertEqual([by_name[name]["verdict"] for name in ("4bit", "3bit", "tq8", "k8v4")],
                         ["collapses", "collapses", "passes", "passes"])
        self.assertGreater(by_name["4bit"]["weights_error"], 0.5 * zeros["weights_error"])
        self.assertLess(by_name["k8v4"]["weights_error"], 0.3 * zeros["weights_error"])
        centred = self.compare(self.normals(1024, 128) + bias, "4bit", "--center")["results"][0]
        self.assertEqual(centred["verdict"], "passes")
        self.assertLess(centred["part_error"], 0.011)

    def test_controls(self):
        got = self.compare(self.normals(2000, 64), "f32,tq4")["results"]
        exact, tq4, zeros, noise = got
        self.assertEqual((exact["error"], exact["weights_error"], exact["slope"]), (0, 0, 1))
        self.assertEqual((zeros["error"], zeros["cosine"], zeros["slope"]), (1, 0, 0))
        self.assertAlmostEqual(noise["error"], 2, delta=0.05)
        self.assertAlmostEqual(noise["slope"], 0, delta=0.05)
        self.assertAlmostEqual(tq4["slope"], 1 - tq4["error"], delta=0.002)
        self.assertEqual(tq4["verdict"], "passes")
        self.assertIn("rows of zeros", self.ctl("codec", "compare", "--format", "tq4", "--head-dim", 64,
                                                self.path("k.f32")))

    def test_given_queries(self):
        """Queries of a file are scaled by 1/sqrt(d); logits that hardly spread are said to prove nothing."""
        self.path("q.f32", self.normals(8, 64, seed=6) * np.float32(0.01))
        text = self.ctl("codec", "compare", "--format", "tq4", "--head-dim", 64, "--queries", self.path("q.f32"),
                        self.path("k.f32", self.normals(100, 64)))
        self.assertIn("8 given queries", text)
        self.assertIn("weights prove nothing", text)

    def test_a_capture(self):
        """Rows of one head of a layer, with the queries that read it: as if they were cut out by hand."""
        raw = SMOLLM.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        names = {}
        for name, told in json.loads(raw[8:8 + size]).items():
            if name[1:] == ".18":
                first, last = told["data_offsets"]
                self.assertEqual(told["dtype"], "BF16")
                words = np.frombuffer(raw[8 + size + first:8 + size + last], "<u2").astype(np.uint32) << 16
                names[name] = words.view(np.float32).reshape(told["shape"])
        k, q, v = names["k.18"], names["q.18"], names["v.18"]
        n, group = len(k), q.shape[1] // k.shape[1]
        queries = np.array([q[(i + 1) * n // 64 - 1, group + i % group] for i in range(64)])
        asked = ("codec", "compare", "--format", "tq4,k8v4", SMOLLM, "--json", "--layer", 18, "--head", 1)
        got = json.loads(self.ctl(*asked))
        self.assertEqual((got["layer"], got["head"], got["rows"], got["queries"], got["head_dim"]), (18, 1, n, 64, 64))
        alone = self.compare(np.ascontiguousarray(k[:, 1]), "tq4,k8v4", "--queries", self.path("q.f32", queries))
        self.assertEqual(got["results"], alone["results"])
        values = json.loads(self.ctl(*asked, "--side", "v", "--head-dim", 64))
        self.assertEqual(values["results"], self.compare(np.ascontiguousarray(v[:, 1]), "tq4,k8v4", "--side", "v")["results"])
        self.assertIn("keys of layer 18, KV head 0: 256 rows, 64 captured queries",
                      self.ctl("codec", "compare", "--format", "tq4", "--layer", 18, SMOLLM))

    def test_a_capture_is_not_read_as_numbers(self):
        asked = ("codec", "compare", "--format", "tq4")
        self.refused(2, "a capture of 3 layers, 0 to 29: --layer says which", *asked, SMOLLM)
        self.refused(2, "no layer 7; 3 are captured", *asked, SMOLLM, "--layer", 7)
        self.refused(2, "3 KV heads", *asked, SMOLLM, "--layer", 0, "--head", 3)
        self.refused(2, "have 64 numbers, not 128", *asked, SMOLLM, "--layer", 0, "--head-dim", 128)
        bare = self.path("k.f32", self.normals(10, 64))
        self.refused(2, "--head-dim is missing", *asked, bare)
        self.refused(2, "--layer and --head are of captures", *asked, bare, "--head-dim", 64, "--layer", 0)
        self.refused(1, "this is a safetensors file", *asked, bare, "--head-dim", 64, "--queries", SMOLLM)
        self.refused(1, "this is a safetensors file", "codec", "encode", "--format", "tq4", "--head-dim", 64, SMOLLM, self.path("out"))
        self.path("cut", SMOLLM.read_bytes()[:4096])
        self.refused(1, "cut: ", *asked, self.path("cut"), "--layer", 0)

    def test_refusals(self):
        rows = self.normals(10, 64)
        compare = ("codec", "compare", "--head-dim", 64)
        self.refused(2, "unknown row format", *compare, "--format", "tq4,x", self.path("k.f32", rows))
        self.refused(2, "--format: '': expected", *compare, "--format", "tq4,", self.path("k.f32"))
        self.refused(2, "--side: 'x'", *compare, "--format", "tq4", "--side", "x", self.path("k.f32"))
        self.refused(1, "one row", *compare, "--format", "tq4", self.path("k.f32", rows[:1]))
        self.refused(1, "no rows", *compare, "--format", "tq4", self.path("k.f32", b""))
        rows[3, 2] = np.nan
        self.refused(1, "row 3: channel 2 (offset 776) is nan", *compare, "--format", "tq4", self.path("k.f32", rows))


class Presets(Codec):
    def test_bytes_of_a_token(self):
        """By hand: 4 layers, 2 KV heads, d = 64; 4bit is 36 + 40 bytes; two layers stay bf16, 256 bytes."""
        got = json.loads(self.ctl("presets", "--layers", 4, "--kv-heads", 2, "--head-dim", 64, "--exact-layers", 1,
                                  "--json"))
        rows = {row["name"]: row for row in got["presets"]}
        self.assertEqual(sorted(rows), sorted(("k8v4", "4bit", "k3v4", "3bit", "2bit", "k3v2")))
        self.assertEqual(rows["4bit"]["token_bytes"], 2 * (2 * (36 + 40) + 2 * 256))
        self.assertIn("k8v4", self.ctl("presets"))
        self.refused(2, "--head-dim: 72 is not a multiple of 16", "presets", "--head-dim", 72)


class Calibrate(Codec):
    def test_k_center_and_recipe(self):
        """The mean of K in double, rounded once, and the channels with the largest sums of squares."""
        out = self.path("out.json")
        self.ctl("calibrate", SMOLLM, "--out", out, "--recipe", "turboquant35")
        got = json.loads(self.bytes_of("out.json"))
        self.assertEqual((got["version"], got["recipe"], got["head_size"]), (1, "turboquant35", 64))
        tensors, _ = tqkv.safetensors.load(SMOLLM)
        for index, layer in enumerate((0, 18, 29)):
            k, v = (np.asarray(tqkv.from_bf16(tensors[f"{letter}.{layer}"]), np.float64) for letter in "kv")
            total = np.zeros(k.shape[1:])
            for token in k:
                total += token
            mean = (total / len(k)).astype(np.float32)
            self.assertTrue(np.array_equal(np.float32(got["k_center"][index]), mean))
            lists = got["layers"][str(index)]
            for name, rows in (("key", k), ("value", v)):
                squares = (rows**2).sum(axis=0)
                for head, channels in enumerate(lists[f"{name}_high_precision_indices"]):
                    best = sorted(np.argsort(-squares[head], kind="stable")[:32].tolist())
                    self.assertEqual(channels, best)

    def test_a_pool_takes_the_file(self):
        """One file for k_center_file and for recipe_file; of another geometry it is refused."""
        out = self.path("out.json")
        self.ctl("calibrate", SMOLLM, "--out", out, "--recipe", "turboquant25", "--center")
        pool = {"name": "smol", "layers": 3, "q_heads": 9, "kv_heads": 3, "head_dim": 64, "k": "turboquant25",
                "v": "turboquant25", "block_size": 16, "blocks": 16, "k_center_file": out, "recipe_file": out}
        for changes, code in (({}, 0), ({"kv_heads": 9}, 2)):
            config = self.path("tqkvd.json", json.dumps({"pools": [{**pool, **changes}]}).encode())
            done = subprocess.run([TQKVD, "--config", config, "--memory", "64MiB", "--check-config"],
                                  capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, code, done.stderr)

    def test_refusals(self):
        self.refused(2, "--out is missing", "calibrate", SMOLLM)
        self.refused(2, "--recipe: 'tq4'", "calibrate", SMOLLM, "--out", self.path("x"), "--recipe", "tq4")
        self.refused(1, "the output is the input", "calibrate", SMOLLM, "--out", SMOLLM)
        self.refused(1, "x.safetensors: ", "calibrate", self.path("x.safetensors", b"nothing"), "--out", self.path("x"))
        self.assertEqual(self.names(), ["x.safetensors"])


if __name__ == "__main__":
    unittest.main()
