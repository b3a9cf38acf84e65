"""SmolLM2-135M-Instruct as a transformers model, its K/V in tqkvd. Skipped where its package is not installed."""

import inspect
import unittest

import numpy as np
import torch
import tqkv
import tqkv.hf
from daemon import Daemon
from model import Model, find_weights
from settings import EXACT
from transformers import LlamaConfig, LlamaForCausalLM

# Its new name; releases before 5.2x know the old one.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
PROMPT = "The history of the steam engine begins with"


def neighbours_apart(weight, head_dim):
    """GGUF has the channels that RoPE turns together side by side, transformers half a head apart."""
    return weight.reshape(-1, head_dim // 2, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def to_transformers(model, metadata):
    """The same weights in a LlamaForCausalLM."""
    llama = model.llama
    config = LlamaConfig(
        vocab_size=len(llama.embedding), hidden_size=llama.embedding.shape[1], num_hidden_layers=model.n_layers,
        intermediate_size=metadata["llama.feed_forward_length"], num_attention_heads=model.q_heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_dim, rms_norm_eps=float(llama.norm_epsilon),
        rope_parameters={"rope_type": "default", "rope_theta": float(llama.rope_base)}, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2)
    weights = {"model.embed_tokens.weight": llama.embedding, "model.norm.weight": llama.output_norm}
    for i, layer in enumerate(model.weights):
        q, k, v = np.split(layer["qkv"].T, [model.q_heads * model.head_dim,
                                            (model.q_heads + model.kv_heads) * model.head_dim])
        gate, up = np.split(layer["gate_up"].T, 2)
        parts = {"self_attn.q_proj": neighbours_apart(q, model.head_dim),
                 "self_attn.k_proj": neighbours_apart(k, model.head_dim), "self_attn.v_proj": v,
                 "self_attn.o_proj": layer["out"].T, "mlp.gate_proj": gate, "mlp.up_proj": up,
                 "mlp.down_proj": layer["down"].T, "input_layernorm": layer["attn_norm"],
                 "post_attention_layernorm": layer["ffn_norm"]}
        weights.update({f"model.layers.{i}.{name}.weight": part for name, part in parts.items()})
    with torch.device("meta"):
        made = LlamaForCausalLM(config)
    made = made.to_empty(device="cpu").eval()
    made.model.rotary_emb = type(made.model.rotary_emb)(config=config)
    missing, unexpected = made.load_state_dict(
        {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in weights.items()}, strict=False)
    made.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return made


class SmolLM2(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        path = find_weights()
        if path is None:
            raise unittest.SkipTest("SmolLM2-135M-Instruct is not there: deploy/install-packages quality")
        cls.numpy_model = Model(path)
        cls.ids = cls.numpy_model.tokenizer.encode(PROMPT)
        cls.model = to_transformers(cls.numpy_model, cls.numpy_model.metadata)
        cls.daemon = Daemon()
        cls.control = tqkv.http.Control(cls.daemon.http)

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        assert code == 0, (code, cls.daemon.log())

    def generate(self, pool=None, n=20, **members):
        ids = torch.tensor([self.ids])
        with torch.no_grad():
            if pool is None:
                self.model.set_attn_implementation("sdpa")
                return self.model.generate(ids, do_sample=False, max_new_tokens=n)[0, len(self.ids):].tolist()
            self.control.create_pool(**tqkv.hf.pool_description(self.model.config, pool, blocks=16, **members))
            self.model.set_attn_implementation("tqkv")
            with tqkv.Client(self.daemon.addr, timeout=60) as client, client.open(pool) as session:
                cache = tqkv.hf.TqkvCache(session, self.model.config)
                made = self.model.generate(ids, do_sample=False, max_new_tokens=n, **{CACHE: cache})
                memory = self.control.occupancy()["pools"][-1]["memory"]
            return made[0, len(self.ids):].tolist(), memory["compression"]

    def test_the_weights_are_the_same_model(self):
        """torch and numpy compute the same logits."""
        with torch.no_grad():
            got = self.model(torch.tensor([self.ids])).logits[0].numpy()
        x = self.numpy_model.hidden(self.ids, EXACT)
        expected = np.concatenate([block for _, block in self.numpy_model.logits(x)])
        self.assertLess(np.linalg.norm(got - expected) / np.linalg.norm(expected), 1e-4)

    def test_it_says_the_same_with_its_cache_in_the_daemon(self):
        """All of it with float32 rows, the beginning with 8 bits, sense with 4, at less than a third of bf16's bytes."""
        exact = self.generate()
        self.assertEqual(self.generate("f32", k="f32", v="f32")[0], exact)
        self.assertEqual(self.generate("tq8", k="tq8", v="tq8")[0][:8], exact[:8])
        made, compression = self.generate("4bit", preset="4bit")
        self.assertEqual(made[:3], exact[:3])
        self.assertGreater(compression, 3)


if __name__ == "__main__":
    unittest.main()
