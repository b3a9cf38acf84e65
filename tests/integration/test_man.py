"""The manual pages: nothing that the programs have is missing, and they are valid."""

import re
import shutil
import subprocess
import unittest

from daemon import BUILD, Daemon


def shown(path):
    """The page's text without roff's escapes."""
    return re.sub(r"^\.[A-Z]+ ?", "", path.read_text(), flags=re.M).replace("\\-", "-").replace("\\&", "")


class Man(unittest.TestCase):
    def test_every_option_of_the_daemon(self):
        page = shown(BUILD / "server/tqkvd.8")
        with Daemon("--backend", "cpu") as daemon:
            names = [name for name in daemon.get("/v1/config") if name not in ("listen", "pools", "tenants")]
        self.assertGreater(len(names), 20)
        for name in [*names, "listen", "pool", "config", "check-config"]:
            self.assertRegex(page, rf"(?m)^--{name.replace('_', '-')}\b", name)
        for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SIGNALS", "FILES"):
            self.assertRegex(page, rf"(?m)^{section}$")

    def test_every_command_and_option_of_the_control_program(self):
        page = shown(BUILD / "server/tqkvctl.1")
        ask = lambda *words: subprocess.run([BUILD / "server/tqkvctl", *words, "--help"], capture_output=True,
                                            text=True, check=True, timeout=60).stdout
        commands = re.search(r"commands:\n(.*?)\n\n", ask(), re.S).group(1).splitlines()
        self.assertGreater(len(commands), 10)
        for line in commands:
            term = re.match(r"  (\S.*?)\s{2,}", line).group(1)
            self.assertRegex(page, rf"(?m)^{re.escape(term)}$")
            words = [word for word in term.split() if re.fullmatch(r"[a-z0-9-]+", word)]
            for option in re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", ask(*words)):
                self.assertRegex(page, rf"(?m){re.escape(option)}\b", term)

    @unittest.skipUnless(shutil.which("mandoc"), "mandoc is not installed")
    def test_they_are_valid(self):
        for name in ("tqkvd.8", "tqkvctl.1"):
            done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", BUILD / "server" / name],
                                  capture_output=True, text=True, timeout=60)
            complaints = [line for line in done.stdout.splitlines() if "missing date" not in line]
            self.assertEqual(complaints, [])


if __name__ == "__main__":
    unittest.main()
