"""What meson installs can be used: programs, the library with its soname and pkg-config file, the unit, the profile."""

import os
import pathlib
import re
import subprocess
import unittest

from daemon import Daemon

ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
BUILD = pathlib.Path(os.environ["TQKV_BUILD"])
SCRATCH = pathlib.Path(os.environ["TQKV_SCRATCH"])
PROGRAM = r"""
#include <stdio.h>
#include <tqkv.h>
#include <tqkv_codec.h>

int main(int argc, char **argv)
{
	struct tqkv_error error;
	struct tqkv_conn *conn;

	if (argc < 2 || tqkv_connect(argv[1], NULL, &conn, &error) != TQKV_OK)
		return 1;
	if (tqkv_ping(conn, NULL, 5000, &error) != TQKV_OK)
		return 2;
	printf("%s\n", tqkv_version());
	tqkv_disconnect(conn);
	return 0;
}
"""


def run(*command, env=None):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120,
                          stdin=subprocess.DEVNULL, env=dict(os.environ, **(env or {})))
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


class Install(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = SCRATCH / "installed"
        run("meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", env={"DESTDIR": str(cls.root)})
        cls.version = re.search(r"version: '([\d.]+)'", (ROOT / "meson.build").read_text()).group(1)
        cls.unit = cls.one("tqkvd.service")
        cls.prefix = cls.unit.parents[3]

    @classmethod
    def one(cls, name):
        found = [path for path in cls.root.rglob(name)]
        assert len(found) == 1, (name, found)
        return found[0]

    def test_everything_is_there(self):
        """And nothing of the tests or of internal libraries."""
        for name in ("tqkvd", "tqkvctl", "tqkv.h", "tqkv_codec.h", "tqkv.pc", "libtqkv.so", "seccomp-io_uring.json"):
            self.one(name)
        names = {path.name for path in self.root.rglob("*") if path.is_file()}
        self.assertEqual([name for name in sorted(names) if re.match(r"test_|fuzz_|libtqkv_|make_codebooks", name)], [])

    def test_a_program_finds_the_library(self):
        """Compiled and linked with what pkg-config says, it needs the soname and nothing else of ours, and pings a daemon."""
        pc = self.one("tqkv.pc")
        library = self.one(f"libtqkv.so.{self.version}")
        major = self.version.split(".")[0]
        env = {"PKG_CONFIG_PATH": str(pc.parent), "PKG_CONFIG_SYSROOT_DIR": str(self.root)}
        self.assertEqual(run("pkg-config", "--modversion", "tqkv", env=env).strip(), self.version)
        source, program = SCRATCH / "use.c", SCRATCH / "use"
        source.write_text(PROGRAM)
        flags = run("pkg-config", "--cflags", "--libs", "tqkv", env=env).split()
        run("gcc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o", program, source, *flags)
        needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", program))
        self.assertIn(f"libtqkv.so.{major}", needed)
        self.assertEqual([name for name in needed if "tqkv" in name], [f"libtqkv.so.{major}"])
        self.assertIn(f"[libtqkv.so.{major}]", run("readelf", "-d", library))
        with Daemon() as daemon:
            said = run(program, daemon.addr, env={"LD_LIBRARY_PATH": str(library.parent)})
        self.assertEqual(said.strip(), self.version)

    def test_the_library_exports_only_its_own_names(self):
        rows = [line.split() for line in run("nm", "-D", "--defined-only", self.one(f"libtqkv.so.{self.version}")).splitlines()]
        names = {row[-1].split("@")[0] for row in rows}
        self.assertGreater(len(names), 20)
        self.assertEqual([name for name in sorted(names) if not name.startswith("tqkv_")], [])
        needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", self.one(f"libtqkv.so.{self.version}")))
        allowed = r"lib(c|m)\.so|ld-linux|lib(asan|ubsan|tsan)\.so"
        self.assertEqual([name for name in needed if not re.match(allowed, name)], [])

    def test_the_unit_starts_the_installed_program(self):
        start = re.search(r"^ExecStart=(\S+)", self.unit.read_text(), re.M).group(1)
        self.assertTrue((self.root / start.lstrip("/")).is_file(), start)
        self.assertEqual(self.unit.relative_to(self.prefix).as_posix(), "lib/systemd/system/tqkvd.service")
