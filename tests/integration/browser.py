"""Headless Chromium for the tests of the dashboard, driven over the WebDriver protocol with nothing but urllib."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

PATIENCE_S = 60
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of an element reference


def is_there():
    return shutil.which("chromedriver") is not None and shutil.which("chromium") is not None


class Browser:
    """with Browser(1200, 900) as browser: browser.open(url); browser.run("return document.title")"""

    def __init__(self, width, height):
        self.profile = tempfile.mkdtemp(prefix="tqkv-browser.")
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, cwd=self.profile)
        self.session = None
        try:
            self.base = f"http://127.0.0.1:{self._port()}"
            arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                         "--disable-background-networking", f"--user-data-dir={self.profile}"]
            wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": arguments},
                                      "goog:loggingPrefs": {"browser": "ALL"}}}
            self.session = self._call("POST", "/session", {"capabilities": wanted})["sessionId"]
            self.size(width, height)
        except BaseException:
            self.close()
            raise

    def _port(self):
        for line in self.driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found.group(1))
        raise AssertionError("chromedriver ended")

    def _call(self, method, path, body=None):
        if path != "/session":
            path = f"/session/{self.session}{path}"
        request = urllib.request.Request(self.base + path, method=method, headers={"Content-Type": "application/json"},
                                         data=None if body is None else json.dumps(body).encode())
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=PATIENCE_S) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from error

    def open(self, url):
        self._call("POST", "/url", {"url": url})

    def run(self, script, *args):
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def devtools(self, command, **params):
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def size(self, width, height):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, is_dark):
        value = "dark" if is_dark else "light"
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def press(self, *keys):
        """Keys as a person presses them, by their WebDriver code points."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def console(self):
        """Messages since the last call."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def wait(self, script, *args):
        """The first true value that the script returns."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            value = self.run(script, *args)
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}")

    def screenshot(self, path):
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return innerWidth")
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True,
                             clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def close(self):
        if self.session:
            self._call("DELETE", "")
            self.session = None
        self.driver.terminate()
        self.driver.wait(PATIENCE_S)
        self.driver.stdout.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
