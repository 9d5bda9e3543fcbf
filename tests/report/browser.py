"""Debian's Chromium, spoken to over a pipe: the DevTools protocol needs no library for that."""

import base64
import fcntl
import json
import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def found():
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser; `said` holds what it complained of."""

    def __init__(self, profile):
        to_child, self._in = _pipe()
        self._out, from_child = _pipe()
        command = [found(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        script = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, *command],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._left, self._last, self._session = b"", 0, None
        self.said, self._loaded = [], False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, file, width, dark, height=900):
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self._ask("Emulation.setDeviceMetricsOverride", mobile=width < 600, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._ask("Page.navigate", url=file.absolute().as_uri())
        while not self._loaded:
            self._hear()

    def ask(self, script):
        """The value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, out):
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        os.close(self._in)
        os.close(self._out)
        self._process.terminate()
        self._process.wait(20)

    def _ask(self, method, **params):
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._last:
                assert "error" not in heard, heard
                return heard["result"]

    def _hear(self):
        while b"\0" not in self._left:
            more = os.read(self._out, 1 << 20)
            assert more, "the browser ended"
            self._left += more
        text, self._left = self._left.split(b"\0", 1)
        heard = json.loads(text)
        method, params = heard.get("method"), heard.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(params)
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.said.append(url)
        return heard


def _pipe():
    """Ends above those that the browser's own 3 and 4 take the place of."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high
