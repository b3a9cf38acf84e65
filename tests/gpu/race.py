#!/usr/bin/env python3
"""race.py TQKVD [--backend NAME] [--rounds N]: row K12 of the list of failures against a real daemon. Appends, and sent
behind each without waiting for it DECODE, FORK, SPILL or a snapshot; every decode must find the newest row. Each value
row carries its number in the signs of its channels, and the query is its key, so an old row is another number. Exit 77
without numpy.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "proto/python"))

try:
	import numpy as np
	import tqkv
except ImportError as missing:
	print(missing)
	sys.exit(77)

DIM, HEADS, BITS, LENGTH_MAX = 64, 2, 32, 480
POOL = f"name=race,layers=1,q_heads=2,kv_heads={HEADS},head_dim={DIM},k=tq4,v=tq4,block_size=16,blocks=512"


def value_of(number):
	signs = np.array([1.0 if number >> bit & 1 else -1.0 for bit in range(BITS)], np.float32)
	return np.tile(signs, DIM // BITS)


def number_of(out):
	signs = out.reshape(-1, BITS).sum(axis=0) > 0
	return sum(1 << bit for bit in range(BITS) if signs[bit])


def wait_for(log, daemon, pattern):
	for _ in range(600):
		found = re.search(pattern, log.read_text())
		if found:
			return found.group(1)
		if daemon.poll() is not None:
			break
		time.sleep(0.1)
	sys.exit(f"the daemon did not come up:\n{log.read_text()}")


class Race:
	def __init__(self, client, http):
		self.client, self.http = client, http
		self.rng = np.random.default_rng(12)
		self.session = client.open("race", session="race")
		self.length = self.number = self.n_restored = 0

	def ask(self, method, path, body=None):
		request = urllib.request.Request(f"http://{self.http}{path}", method=method,
			data=None if body is None else json.dumps(body).encode(), headers={"Content-Type": "application/json"})
		with urllib.request.urlopen(request, timeout=60) as reply:
			return json.loads(reply.read())

	def checkpoint(self, path):
		begun = self.ask("POST", path, {"name": "race"})["n_begun"]
		while True:
			view = self.ask("GET", "/v1/snapshot")
			if view["n_begun"] != begun or view["state"] != "running":
				break
			time.sleep(0.002)
		if view["status"] != "OK":
			sys.exit(f"{path}: {view['status']}: {view['detail']}")

	def check(self, out, what):
		for head in range(HEADS):
			seen = number_of(out[head])
			if seen != self.number:
				sys.exit(f"FAILED: {what} at length {self.length} found row {seen}, the newest is {self.number}")

	def round(self, reader):
		n = int(self.rng.integers(1, 20))
		k = self.rng.standard_normal((n, HEADS, DIM)).astype(np.float32)
		v = np.stack([np.stack([value_of(self.number + 1 + i)] * HEADS) for i in range(n)])
		q = 4 * k[-1]
		self.number += n
		with self.client.pipeline(self.session) as pipe:
			appended = pipe.append(1, layer=0, k=k, v=v, position=self.length)
			self.length += n
			if reader == "decode":
				self.check(pipe.decode(1, layer=0, q=q).result(), reader)
			elif reader == "fork":
				pipe.fork(2, 1, self.length)
				self.check(pipe.decode(2, layer=0, q=q).result(), reader)
				pipe.free(2).result()
			elif reader == "spill":
				self.session.spill([1])
				if self.number % 2:
					time.sleep(0.003)
			else:
				self.checkpoint("/v1/snapshot")
			appended.result()
		self.check(self.session.decode(1, layer=0, q=q), f"decode after {reader}")
		if reader == "snapshot":
			self.session.close()
			self.checkpoint("/v1/restore")
			self.session = self.client.attach("race")
			self.check(self.session.decode(1, layer=0, q=q), "decode after restore")
			self.n_restored += 1
		if self.length > LENGTH_MAX:
			self.session.free(1)
			self.length = 0


def main():
	parser = argparse.ArgumentParser(description=__doc__)
	parser.add_argument("tqkvd")
	parser.add_argument("--backend", default="cuda")
	parser.add_argument("--rounds", type=int, default=2000)
	arguments = parser.parse_args()
	with tempfile.TemporaryDirectory(prefix="tqkv-race.") as folder:
		log = pathlib.Path(folder) / "tqkvd.log"
		with log.open("w") as out:
			daemon = subprocess.Popen([arguments.tqkvd, "--backend", arguments.backend, "--listen",
				f"unix:{folder}/tqkvd.sock", "--http", "127.0.0.1:0", "--memory", "256MiB", "--pool", POOL,
				"--host-tier-bytes", "16MiB", "--snapshot-dir", folder], stderr=out)
		try:
			http = wait_for(log, daemon, r"control API on http://(\S+)")
			started = time.monotonic()
			with tqkv.Client(f"unix:{folder}/tqkvd.sock") as client:
				race = Race(client, http)
				readers = ["decode", "fork", "spill"]
				for i in range(arguments.rounds):
					race.round("snapshot" if i % 50 == 49 else readers[i % 3])
			print(f"ok    {arguments.rounds} rounds on {arguments.backend}, {race.number} rows, {race.n_restored} restored, "
				f"{time.monotonic() - started:.1f} s")
		finally:
			daemon.terminate()
			daemon.wait(timeout=30)


if __name__ == "__main__":
	main()
