"""The control API over TLS: certificates of the daemon and of clients, what replaces them, what a mistake is told."""

import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.request

import tqkv
import tqkv.http
from daemon import BUILD, EXACT, PATIENCE_S, Daemon, folder_with, run_tqkvd, until


def make_certificates(folder):
    """An authority, a server and a client of it; another authority with a client; an expired client."""
    def openssl(*args):
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, cwd=folder)

    for authority in ("ca", "other"):
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-keyout",
                f"{authority}.key", "-out", f"{authority}.pem", "-subj", f"/CN={authority}")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other"), ("expired", "ca")):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key", "-out",
                f"{name}.csr", "-subj", f"/CN={name}")
        days = "-1" if name == "expired" else "2"
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                "-CAcreateserial", "-days", days, "-out", f"{name}.pem", "-extfile", "san")


class Tls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="tqkv-test."))
        make_certificates(cls.folder)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder, ignore_errors=True)

    def options(self, *more):
        return ["--backend", "cpu", "--pool", EXACT, "--http-certificate-file", self.folder / "server.pem",
                "--http-key-file", self.folder / "server.key", *more]

    def context(self, authority="ca", client=None):
        context = ssl.create_default_context(cafile=self.folder / f"{authority}.pem")
        if client:
            context.load_cert_chain(self.folder / f"{client}.pem", self.folder / f"{client}.key")
        return context

    def fails(self, daemon, context):
        """The handshake ends with an error that both sides know of, and the next client is served."""
        with self.assertRaises((ssl.SSLError, urllib.error.URLError, OSError)):
            urllib.request.urlopen(f"https://{daemon.http}/livez", timeout=PATIENCE_S, context=context).read()

    def test_https(self):
        """FAILURES W6: TLS 1.3 and nothing older; a wrong authority and plain HTTP fail cleanly."""
        with Daemon(*self.options(), tls=self.context()) as daemon:
            self.assertEqual(daemon.request("GET", "/v1/info")[0], 200)
            self.fails(daemon, self.context("other"))
            old = self.context()
            old.maximum_version = ssl.TLSVersion.TLSv1_2
            self.fails(daemon, old)
            with self.assertRaises((urllib.error.URLError, OSError, http.client.HTTPException)):
                urllib.request.urlopen(f"http://{daemon.http}/livez", timeout=PATIENCE_S).read()
            # No server name: an address has none, and the certificate is given all the same.
            bare = self.context()
            bare.check_hostname = False
            host, port = daemon.http.rsplit(":", 1)
            with socket.create_connection((host, int(port)), PATIENCE_S) as plain, bare.wrap_socket(plain) as tls:
                self.assertEqual(tls.version(), "TLSv1.3")
            self.assertEqual(daemon.request("GET", "/livez")[0], 200)

    def test_a_peer_that_is_silent_in_its_handshake_costs_no_processor(self):
        def seconds(daemon):
            fields = pathlib.Path(f"/proc/{daemon.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

        inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        with self.assertRaises(ssl.SSLWantReadError):
            self.context().wrap_bio(inward, outward, server_hostname="localhost").do_handshake()
        hello = outward.read()
        with Daemon(*self.options(), tls=self.context()) as daemon:
            host, port = daemon.http.rsplit(":", 1)
            for n_bytes in (20, len(hello)):
                with socket.create_connection((host, int(port)), PATIENCE_S) as peer:
                    peer.sendall(hello[:n_bytes])
                    shares = []
                    for _ in range(5):
                        used, began = seconds(daemon), time.monotonic()
                        time.sleep(0.3)
                        shares.append((seconds(daemon) - used) / (time.monotonic() - began))
                    self.assertLess(min(shares), 0.3, (n_bytes, shares))

    def test_client_certificates(self):
        """FAILURES W6: whoever has none, one of another authority, or an old one ends in the handshake; others do not notice."""
        with Daemon(*self.options("--http-client-ca-file", self.folder / "ca.pem"),
                    tls=self.context(client="client")) as daemon:
            self.assertEqual(daemon.request("GET", "/v1/info")[0], 200)
            self.assertEqual(daemon.request("PUT", "/v1/log-level", {"level": "info"})[0], 200)
            for client in (None, "stranger", "expired"):
                self.fails(daemon, self.context(client=client))
            self.assertEqual(daemon.request("GET", "/livez")[0], 200)

    def test_python_over_https(self):
        """With the authority's file, and with a client certificate where the daemon asks for one."""
        ca_file = self.folder / "ca.pem"
        with Daemon(*self.options("--http-client-ca-file", ca_file), tls=self.context(client="client")) as daemon:
            shown = {"certificate_file": self.folder / "client.pem", "key_file": self.folder / "client.key"}
            self.assertIn("version", tqkv.http.Control(f"https://{daemon.http}", ca_file=ca_file, **shown).info())
            for address, more in ((f"https://{daemon.http}", {"ca_file": ca_file}),
                                  (f"https://{daemon.http}", {"ca_file": self.folder / "other.pem", **shown}),
                                  (daemon.http, {})):
                with self.assertRaises(tqkv.TqkvError) as caught:
                    tqkv.http.Control(address, timeout=PATIENCE_S, **more).info()
                self.assertEqual(caught.exception.status_name, "IO_ERROR")
            with self.assertRaisesRegex(tqkv.TqkvError, "is asked at https://host:port"):
                tqkv.http.Control(daemon.http, timeout=PATIENCE_S).info()

    def test_tqkvctl_over_https(self):
        """The certificate must come from who is trusted and carry the address; each mistake says what is wrong with what."""
        def run(*args, **env):
            return subprocess.run([BUILD / "server/tqkvctl", *map(str, args)], capture_output=True, text=True,
                                  timeout=PATIENCE_S, env={**os.environ, **{name: str(text) for name, text in env.items()}})

        ca_file = self.folder / "ca.pem"
        with Daemon(*self.options(), tls=self.context()) as daemon:
            where = ("--http", f"https://{daemon.http}")
            for done in (run(*where, "--http-ca-file", ca_file, "--json", "info"),
                         run("--json", "info", TQKV_HTTP=f"HTTPS://{daemon.http}", TQKV_HTTP_CA_FILE=ca_file)):
                self.assertEqual((done.returncode, done.stderr), (0, ""))
                self.assertIn("version", json.loads(done.stdout))
            # A body in both directions, larger than a record.
            self.assertEqual(run(*where, "--http-ca-file", ca_file, "plan", "--model", "llama-3.1-8b").returncode, 0)
            host, port = daemon.http.rsplit(":", 1)
            for args, words in ((where, ["NOT trusted", "issuer is unknown", "--http-ca-file"]),
                                ((*where, "--http-ca-file", self.folder / "other.pem"), ["issuer is unknown"]),
                                ((*where, "--http-ca-file", self.folder / "absent.pem"), ["--http-ca-file", "absent.pem"]),
                                ((*where, "--http-ca-file", self.folder / "server.key"), ["--http-ca-file", "server.key"]),
                                ((*where, "--http-key-file", ca_file), ["--http-certificate-file"]),
                                ((*where, "--http-certificate-file", ca_file), ["--http-certificate-file", "ca.pem"]),
                                (("--http", daemon.http), ["a daemon with a certificate is asked at https://HOST:PORT"])):
                done = run(*args, "info")
                self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (1, "", 1), done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)
            self.assertEqual(run(*where, "--http-ca-file", ca_file, "info").returncode, 0)
        with Daemon("--backend", "cpu", "--pool", EXACT) as daemon:
            done = run("--http", f"https://{daemon.http}", "--http-ca-file", ca_file, "info")
            self.assertEqual(done.returncode, 1)
            self.assertIn("A daemon without a certificate is asked at HOST:PORT, without https://", done.stderr)

    def test_tqkvctl_checks_the_name(self):
        """A certificate of the right authority for another address is none."""
        folder = folder_with(self)
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        key = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=127.0.0.1",
               "-keyout", "else.key", "-out", "else.csr"]
        sign = ["openssl", "x509", "-req", "-in", "else.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2",
                "-extfile", "else.cnf", "-out", "else.pem"]
        (folder / "else.cnf").write_text("subjectAltName=DNS:elsewhere.example,IP:127.0.0.9\n")
        for command in (key, sign):
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        with Daemon("--backend", "cpu", "--pool", EXACT, "--http-certificate-file", folder / "else.pem", "--http-key-file",
                    folder / "else.key", tls=ssl._create_unverified_context()) as daemon:
            done = subprocess.run([BUILD / "server/tqkvctl", "--http", f"https://{daemon.http}", "--http-ca-file",
                                   folder / "ca.pem", "info"], capture_output=True, text=True, timeout=PATIENCE_S)
            self.assertEqual(done.returncode, 1)
            self.assertIn("does not match", done.stderr)

    def test_tqkvctl_shows_a_certificate(self):
        ca_file = self.folder / "ca.pem"
        with Daemon(*self.options("--http-client-ca-file", ca_file), tls=self.context(client="client")) as daemon:
            command = [BUILD / "server/tqkvctl", "--http", f"https://{daemon.http}", "--http-ca-file", ca_file, "info"]
            for more, code in (([], 1), (["--http-certificate-file", self.folder / "client.pem", "--http-key-file",
                                          self.folder / "client.key"], 0)):
                done = subprocess.run([*map(str, command + more)], capture_output=True, text=True, timeout=PATIENCE_S)
                self.assertEqual(done.returncode, code, done.stderr)
                self.assertEqual("--http-certificate-file" in done.stderr, code == 1, done.stderr)

    def rotated(self):
        """The files of a daemon, to be replaced, and a second authority's set beside them."""
        folder, fresh = (folder_with(self) for _ in range(2))
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        make_certificates(fresh)
        return folder, fresh

    def client(self, authority, client=None):
        context = ssl.create_default_context(cafile=authority / "ca.pem")
        if client:
            context.load_cert_chain(client / "client.pem", client / "client.key")
        return context

    def replace(self, folder, fresh, *names):
        for name in names:
            (folder / "new").write_bytes((fresh / name).read_bytes())
            (folder / "new").rename(folder / name)

    def test_a_reload_replaces_certificates(self):
        """By request and by signal; connections that are open go on, the listener is the same one."""
        folder, fresh = self.rotated()
        with Daemon("--backend", "cpu", "--pool", EXACT, "--http-certificate-file", folder / "server.pem",
                    "--http-key-file", folder / "server.key", tls=self.client(folder)) as daemon:
            host, port = daemon.http.rsplit(":", 1)
            kept = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=self.client(folder))
            self.addCleanup(kept.close)

            def ask_kept():
                kept.request("GET", "/livez")
                reply = kept.getresponse()
                reply.read()
                return reply.status

            self.assertEqual(ask_kept(), 200)
            self.replace(folder, fresh, "server.pem", "server.key")
            self.fails(daemon, self.client(fresh))  # not before it is asked for
            status, answer = daemon.request("POST", "/v1/reload", {})
            self.assertEqual((status, answer["changed"], answer["needs_restart"]), (200, [], []))
            self.assertEqual(ask_kept(), 200)
            self.fails(daemon, self.client(folder))
            daemon.tls = self.client(fresh)
            self.assertEqual(daemon.request("GET", "/livez")[0], 200)
            self.replace(folder, self.folder, "server.pem", "server.key")
            daemon.process.send_signal(signal.SIGHUP)

            def is_back():
                try:
                    daemon.tls = self.client(self.folder)
                    return daemon.request("GET", "/livez")[0] == 200
                except (ssl.SSLError, urllib.error.URLError):
                    return False

            until(self, is_back, "the signal did not bring the first certificate back")
            self.assertEqual(ask_kept(), 200)

    def test_certificates_that_do_not_fit_leave_the_old(self):
        """FAILURES M10: a key of another certificate, no PEM, no file: counted, and nothing of the reload is done."""
        folder, fresh = self.rotated()
        config = folder / "tqkvd.json"
        config.write_text("{}")
        with Daemon("--backend", "cpu", "--pool", EXACT, "--config", config, "--http-certificate-file", folder / "server.pem",
                    "--http-key-file", folder / "server.key", tls=self.client(folder)) as daemon:
            before = daemon.get("/v1/config")
            config.write_text('{"io_timeout_ms": 777}')
            damages = (lambda: self.replace(folder, fresh, "server.key"), lambda: (folder / "server.key").write_text("none"),
                       lambda: (folder / "server.key").unlink())
            for i, damage in enumerate(damages):
                damage()
                status, problem = daemon.request("POST", "/v1/reload", {})
                self.assertEqual((status, problem["code"]), (400, "BAD_CONFIG"))
                self.assertIn("http_key_file", problem["detail"])
                self.assertEqual(daemon.metrics()["tqkv_config_reload_failures_total"], i + 1)
                self.assertEqual(daemon.get("/v1/config"), before)
            self.replace(folder, fresh, "server.pem", "server.key")
            self.assertEqual(daemon.request("POST", "/v1/reload", {})[0], 200)
            daemon.tls = self.client(fresh)
            self.assertEqual(daemon.get("/v1/config")["io_timeout_ms"], 777)
            self.assertNotIn("PRIVATE", daemon.log())

    def test_a_reload_replaces_who_may_come(self):
        """Clients of the authority before are out, also those that are connected; a reload cannot end the asking."""
        folder, fresh = self.rotated()
        config = folder / "tqkvd.json"
        members = {"http_certificate_file": str(folder / "server.pem"), "http_key_file": str(folder / "server.key")}
        config.write_text(json.dumps({**members, "http_client_ca_file": str(folder / "ca.pem")}))
        with Daemon("--backend", "cpu", "--pool", EXACT, "--config", config, tls=self.client(self.folder, self.folder)) as daemon:
            host, port = daemon.http.rsplit(":", 1)
            kept = http.client.HTTPSConnection(host, int(port), timeout=PATIENCE_S, context=daemon.tls)
            self.addCleanup(kept.close)
            kept.request("GET", "/v1/info")
            self.assertEqual(kept.getresponse().read()[:1], b"{")
            (folder / "ca.pem").write_bytes((fresh / "ca.pem").read_bytes())
            self.assertEqual(daemon.request("POST", "/v1/reload", {})[0], 200)
            self.fails(daemon, self.client(self.folder, self.folder))
            with self.assertRaises((ssl.SSLError, OSError, http.client.HTTPException)):
                kept.request("GET", "/v1/info")
                kept.getresponse()
            daemon.tls = self.client(self.folder, fresh)
            self.assertEqual(daemon.request("GET", "/v1/info")[0], 200)
            config.write_text(json.dumps(members))
            status, answer = daemon.request("POST", "/v1/reload", {})
            self.assertEqual((status, answer["needs_restart"]), (200, ["http_client_ca_file"]))
            self.fails(daemon, self.client(self.folder))
            self.assertEqual(daemon.request("GET", "/v1/info")[0], 200)

    def test_files_that_do_not_fit_stop_the_start(self):
        for args in (["--http-certificate-file", self.folder / "server.pem"],
                     ["--http-client-ca-file", self.folder / "ca.pem"]):
            self.assertEqual(run_tqkvd("--check-config", *args).returncode, 2)
        done = run_tqkvd("--listen", f"unix:{self.folder}/s", "--memory", "16MiB", "--backend", "cpu", "--http", "127.0.0.1:0",
                         "--http-certificate-file", self.folder / "server.pem", "--http-key-file", self.folder / "san")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("http_key_file", done.stderr)
