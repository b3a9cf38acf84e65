"""tqkvctl attention --explain against numpy: what needs no codec is computed again, the rest has to add up."""

import json
import subprocess
import unittest

import numpy as np
import tqkv
from daemon import BUILD, CAPTURE


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class Explain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        tensors, _ = tqkv.safetensors.load(CAPTURE)
        cls.k, cls.v, cls.q = (np.asarray(tqkv.from_bf16(tensors[f"{letter}.18"]), np.float64) for letter in "kvq")

    def run_ctl(self, *args, code=0):
        done = subprocess.run([BUILD / "server/tqkvctl", "attention", CAPTURE, *map(str, args)], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def explain(self, *args):
        return json.loads(self.run_ctl("--explain", "--json", "--layer", 18, *args).stdout)

    def heads(self, token, window=0):
        """(logits, weights, values) of every query head, in float64."""
        first = max(token + 1 - window, 0) if window else 0
        group = self.q.shape[1] // self.k.shape[1]
        for head in range(self.q.shape[1]):
            k, v = (rows[first:token + 1, head // group] for rows in (self.k, self.v))
            logits = k @ self.q[token, head] / np.sqrt(k.shape[1])
            yield first, logits, softmax(logits), v

    def test_exact_part(self):
        """Weights, scores, spread and the control of zero keys are those of the capture, with a window and without."""
        for token, window in ((200, 0), (255, 40), (0, 0)):
            options = ("--options", f"window={window}") if window else ()
            got = self.explain("--token", token, "--head", 4, "--top", 5, *options)
            for told, (first, logits, weights, v) in zip(got["heads"], self.heads(token, window)):
                out = weights @ v
                zero = np.linalg.norm(v.mean(axis=0) - out) / np.linalg.norm(out)
                self.assertAlmostEqual(told["zero_keys"], zero, delta=1e-6 * (1 + zero))
                self.assertAlmostEqual(told["sigma"], logits.std(), delta=1e-6)
                self.assertAlmostEqual(told["top_weight"], weights.max(), delta=1e-7)
                self.assertEqual(told["top_token"], first + int(weights.argmax()))
            first, logits, weights, _ = list(self.heads(token, window))[4]
            order = np.argsort(-weights, kind="stable")[:5]
            self.assertEqual([row["token"] for row in got["tokens"]], (first + order).tolist())
            for row, at in zip(got["tokens"], order):
                self.assertAlmostEqual(row["score"], logits[at], delta=1e-6)
                self.assertAlmostEqual(row["weight"], weights[at], delta=1e-8)

    def test_causes(self):
        """Numbers as they are: no error. One side coarse: that side, whole. Keys better: a smaller error by keys."""
        for head in self.explain("--token", 150, "--k", "f32", "--v", "f32")["heads"]:
            self.assertLess(head["error"], 1e-6)
            self.assertEqual(head["cause"], "nothing")
        for side, other in (("k", "v"), ("v", "k")):
            name = {"k": "keys", "v": "values"}
            for head in self.explain("--token", 150, f"--{side}", "tq2", f"--{other}", "f32")["heads"]:
                self.assertEqual(head[f"by_{name[other]}"], 0)
                self.assertAlmostEqual(head["error"], head[f"by_{name[side]}"], delta=1e-5)
                if head["error"] > 0.01:
                    self.assertEqual(head["cause"], name[side])
        errors = [np.mean([head["by_keys"] for head in self.explain("--token", 150, "--k", f"tq{bits}")["heads"]])
                  for bits in (2, 4, 8)]
        self.assertEqual(errors, sorted(errors, reverse=True))
        exact = self.explain("--token", 150, "--k", "tq2", "--v", "tq2", "--options", "exact_tokens=160", "--top", 3)
        self.assertTrue(all(row["is_exact"] and row["k_error"] < 1e-9 for row in exact["tokens"]))  # a bf16 capture

    def test_text(self):
        """Says which tokens the query sees, what else is in force, and what to try for the cause that it names."""
        def text(*args):
            return self.run_ctl("--explain", "--layer", 18, "--token", 200, *args).stdout
        self.assertIn("query of token 200 over 201 tokens: tq4/tq4", text())
        self.assertIn("query of token 200, which sees tokens 137 to 200 and the first 4: tq4/tq4, 9 query heads, 3 KV heads, "
                      "softcap 20, the newest 32 tokens exact\n",
                      text("--options", "window=64,sink_tokens=4,softcap=20,exact_tokens=32"))
        self.assertIn("k_center\n", text("--center"))
        self.assertIn("\nKeys: try ", text("--head", 6))
        self.assertIn("\nValues: try ", text("--head", 8))
        self.assertNotIn("try ", text("--k", "f32", "--v", "f32"))

    def test_refusals(self):
        """What is wrong with the line, and with which part of it."""
        for args, text in ((("--explain", "--layer", 18), "--explain, --layer and --token are needed"),
                           (("--explain", "--layer", 1, "--token", 3), "the capture has no layer 1; 3 are captured: 0, 18, 29"),
                           (("--explain", "--layer", 18, "--token", 256), "tokens 0 to 255"),
                           (("--explain", "--layer", 18, "--token", 2, "--head", 9), "query heads 0 to 8"),
                           (("--explain", "--layer", 18, "--token", 2, "--preset", "k8v4", "--k", "tq4"), "--preset")):
            self.assertIn(text, self.run_ctl(*args, code=2).stderr)
        self.assertIn("tq9", self.run_ctl("--explain", "--layer", 18, "--token", 2, "--k", "tq9", code=2).stderr)


if __name__ == "__main__":
    unittest.main()
