"""Unmodified models of transformers with their K/V in tqkvd, against the same models with transformers' own cache."""

import copy
import inspect
import unittest

import numpy as np
import torch
import tqkv
import tqkv.hf
from daemon import Daemon
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config
from transformers import Qwen2ForCausalLM, set_seed

SEED = 20240607
SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "pad_token_id": 0,
         "eos_token_id": None, "bos_token_id": 1, "initializer_range": 0.08}
# Its new name; releases before 5.2x know the old one.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def make(kind=LlamaForCausalLM, config=LlamaConfig, **members):
    set_seed(SEED)
    return kind(config(**{**SIZES, **members})).eval()


class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.control = tqkv.http.Control(cls.daemon.http)
        cls.model = make()
        for name, formats in (("f32", {"k": "f32", "v": "f32"}), ("bf16", {"k": "bf16", "v": "bf16"}),
                              ("4bit", {"preset": "4bit"}), ("tq8", {"k": "tq8", "v": "tq8"})):
            cls.control.create_pool(**tqkv.hf.pool_description(cls.model.config, name, **formats))

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        assert code == 0, (code, cls.daemon.log())

    def setUp(self):
        self.client = tqkv.Client(self.daemon.addr, timeout=60)
        self.addCleanup(self.client.close)
        self.session = self.client.open("f32")
        generator = torch.Generator().manual_seed(SEED)
        self.ids = torch.randint(2, 90, (3, 20), generator=generator)
        self.mask = torch.ones_like(self.ids)
        for row, n_padding in ((0, 7), (2, 3)):
            self.mask[row, :n_padding] = self.ids[row, :n_padding] = 0

    def cache(self, model=None):
        cache = tqkv.hf.TqkvCache(self.session, (model or self.model).config)
        self.addCleanup(cache.close)
        return cache

    def generate(self, cache=None, model=None, ids=None, mask=None, n=25, **options):
        model = model or self.model
        model.set_attn_implementation("sdpa" if cache is None or isinstance(cache, DynamicCache) else "tqkv")
        ids = self.ids if ids is None else ids
        mask = self.mask if mask is None else mask
        if cache is not None:
            options[CACHE] = cache
        with torch.no_grad():
            return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=n, **options)

    def note_requests(self):
        """A list that the opcodes of all requests from now on are added to."""
        connection, sent = self.client._connection, []
        submit = connection.submit
        connection.submit = lambda opcode, *args, **kwargs: sent.append(opcode) or submit(opcode, *args, **kwargs)
        return sent

    def assert_same(self, got, expected):
        self.assertEqual(got.tolist(), expected.tolist())

    def test_a_batch_with_padding_generates_the_same_tokens(self):
        """Greedy, three rows; padding is not stored, and the tokens are not all the same one."""
        expected, cache = self.generate(), self.cache()
        self.assertGreater(len(set(expected[:, 20:].flatten().tolist())), 5)
        self.assert_same(self.generate(cache), expected)
        # The last token has not been fed back.
        stored = [20 - 7 + 24, 20 + 24, 20 - 3 + 24]
        self.assertEqual([self.session.lengths()[sequence] for sequence in cache.sequences], [(n,) * 3 for n in stored])
        cache.close()
        self.assertEqual(self.session.lengths(), {})

    def test_logits_are_those_of_exact_attention(self):
        """A prompt, a second prompt over the first, a token; rows stored as float32: float32's rounding apart."""
        cache, exact = self.cache(), DynamicCache(config=self.model.config)
        for columns in (slice(0, 11), slice(11, 19), slice(19, 20)):
            outs = []
            for kept, name in ((cache, "tqkv"), (exact, "sdpa")):
                self.model.set_attn_implementation(name)
                positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, columns]
                with torch.no_grad():
                    outs.append(self.model(self.ids[:, columns], attention_mask=self.mask[:, :columns.stop],
                                           position_ids=positions, **{CACHE: kept}).logits)
            real = self.mask[:, columns].bool()
            self.assertLess((outs[0] - outs[1])[real].abs().max().item(), 1e-4)
            self.assertGreater(outs[1][real].std().item(), 0.1)

    def test_a_second_turn_goes_on_from_the_first(self):
        """generate() with the same cache: only the new tokens are computed."""
        cache, exact = self.cache(), DynamicCache(config=self.model.config)
        first = self.generate(exact)
        self.assert_same(self.generate(cache), first)
        ids = torch.cat([first, self.ids[:, -6:]], dim=1)
        mask = torch.cat([self.mask, torch.ones(3, ids.shape[1] - 20, dtype=self.mask.dtype)], dim=1)
        self.assert_same(self.generate(cache, ids=ids, mask=mask, n=9), self.generate(exact, ids=ids, mask=mask, n=9))

    def test_beam_search(self):
        """Sequences are forked and freed as beams come and go; afterwards only those of the cache are left."""
        sent = self.note_requests()
        expected, cache = self.generate(num_beams=4, n=15), self.cache()
        self.assert_same(self.generate(cache, num_beams=4, n=15), expected)
        self.assertEqual(set(self.session.lengths()), set(cache.sequences))
        self.assertEqual(len(cache.sequences), 12)
        self.assertIn(tqkv._wire.FORK, sent)
        self.assertNotIn(tqkv._wire.READ, sent)

    def test_speculation_is_rolled_back(self):
        """Prompt lookup guesses tokens; those that were wrong are truncated away."""
        ids = torch.cat([self.ids[1:2]] * 2, dim=1)
        mask, cache, crops = torch.ones_like(ids), self.cache(), []
        crop = cache.crop
        cache.crop = lambda n: (crops.append(n), crop(n))
        expected = self.generate(ids=ids, mask=mask, n=30)
        self.assert_same(self.generate(cache, ids=ids, mask=mask, n=30, prompt_lookup_num_tokens=5), expected)
        self.assertLess(min(crops), 0)

    def test_rows_of_the_batch_are_repeated_selected_and_cropped(self):
        """As the library asks for it; what follows is computed from the right rows."""
        cache = self.cache()
        first = self.generate(cache, n=2)
        for row in ([1, 1, 2], [2, 2, 0]):
            cache.batch_select_indices(torch.tensor(row))
            first = first[row]
            self.mask = self.mask[row]
        cache.batch_repeat_interleave(2)
        first, self.mask = first.repeat_interleave(2, dim=0), self.mask.repeat_interleave(2, dim=0)
        cache.crop(-3)
        self.assertEqual(cache.get_seq_length(), 18)
        cache.crop(15)
        self.assertEqual(cache.get_seq_length(), 15)
        mask = torch.cat([self.mask, torch.ones(6, 2, dtype=self.mask.dtype)], dim=1)
        self.assert_same(self.generate(cache, ids=first, mask=mask, n=8), self.generate(ids=first, mask=mask, n=8))

    def test_a_copied_cache_goes_its_own_way(self):
        """A prompt is computed once and used twice: the copy shares its blocks and changes nothing of the original."""
        prompt, ends = self.ids[1:2, :12], (self.ids[1:2, 12:], self.ids[2:3, 10:])
        cache = self.cache()
        self.model.set_attn_implementation("tqkv")
        with torch.no_grad():
            self.model(prompt, **{CACHE: cache})
        sent = self.note_requests()
        for end in ends:
            ids = torch.cat([prompt, end], dim=1)
            with copy.deepcopy(cache) as copied:
                self.assertEqual(sent, [tqkv._wire.FORK])
                self.assert_same(self.generate(copied, ids=ids, mask=torch.ones_like(ids), n=8),
                                 self.generate(ids=ids, mask=torch.ones_like(ids), n=8))
            del sent[:]
        self.assertEqual(self.session.lengths(), {cache.sequences[0]: (12,) * 3})

    def test_bf16_and_compressed_rows(self):
        """Rows go as bf16; a compressed pool gives nearly the same logits, and not exactly the same."""
        model = make().to(torch.bfloat16)
        with torch.no_grad():
            exact = model(self.ids[1:2]).logits.float()
        for pool, bound in (("bf16", 0.03), ("tq8", 0.03), ("4bit", 0.25)):
            with self.client.open(pool) as session, tqkv.hf.TqkvCache(session) as cache:
                model.set_attn_implementation("tqkv")
                outs = []
                with torch.no_grad():
                    for t in range(20):
                        outs.append(model(self.ids[1:2, t:t + 1], **{CACHE: cache}).logits.float())
                error = ((torch.cat(outs, dim=1) - exact).norm() / exact.norm()).item()
                self.assertLess(error, bound, pool)
                self.assertGreater(error, 0, pool)

    def test_other_families(self):
        """Biases of q, k and v; sliding windows, longer and shorter than the sequence, in a first and a second turn."""
        for kind, config, members in ((Qwen2ForCausalLM, Qwen2Config, {}),
                                      (MistralForCausalLM, MistralConfig, {"sliding_window": 400}),
                                      (MistralForCausalLM, MistralConfig, {"sliding_window": 9})):
            with self.subTest(config=config.__name__, **members):
                model, exact = make(kind, config, **members), DynamicCache()
                cache = self.cache(model)
                first = self.generate(exact, model=model)
                self.assert_same(self.generate(cache, model=model), first)
                ids = torch.cat([first, self.ids[:, -6:]], dim=1)
                mask = torch.cat([self.mask, torch.ones(3, ids.shape[1] - 20, dtype=self.mask.dtype)], dim=1)
                self.assert_same(self.generate(cache, model=model, ids=ids, mask=mask, n=9),
                                 self.generate(exact, model=model, ids=ids, mask=mask, n=9))

    def test_a_mask_that_hides_tokens_in_the_middle_is_refused(self):
        """Not computed as if it were not there."""
        cache = self.cache()
        self.generate(cache, n=2)
        mask = torch.ones(3, 1, 1, 22, dtype=torch.bool)
        mask[..., :7] = False
        mask[1, :, :, 10] = False
        with self.assertRaisesRegex(tqkv.ArgumentError, "not the oldest"), torch.no_grad():
            self.model(torch.tensor([[5], [6], [7]]), attention_mask=mask, position_ids=torch.tensor([[21]] * 3),
                       **{CACHE: cache})

    def test_mistakes_are_named(self):
        """Another attention function, a pool of another model, a batch of another size."""
        cache = self.cache()
        self.model.set_attn_implementation("sdpa")
        with self.assertRaisesRegex(tqkv.ArgumentError, "set_attn_implementation"):
            self.model(self.ids, **{CACHE: cache})
        with self.assertRaisesRegex(tqkv.ArgumentError, "num_hidden_layers|layers 2"):
            tqkv.hf.TqkvCache(self.session, make(num_hidden_layers=2).config)
        cache = self.cache()
        self.generate(cache, n=2)
        with self.assertRaisesRegex(tqkv.ArgumentError, "the batch has 1 rows, the cache 3"):
            ids = torch.cat([self.ids] * 2, dim=1)[:1]
            self.generate(cache, ids=ids, mask=torch.ones_like(ids), n=2)

    def test_a_full_pool_is_an_error_and_the_session_goes_on(self):
        """Not a wrong token. Afterwards the cache can be emptied, and what fits is computed."""
        self.control.create_pool(**tqkv.hf.pool_description(self.model.config, "tiny", k="f32", v="f32", blocks=3))
        with tqkv.Client(self.daemon.addr, timeout=1) as client, client.open("tiny") as session:
            cache = tqkv.hf.TqkvCache(session)
            for n_prompt, n in ((20, 2), (10, 9)):  # in the prompt, and at a later token
                ids = self.ids[:, -n_prompt:]
                with self.assertRaises(tqkv.TqkvError) as raised:
                    self.generate(cache, ids=ids, mask=torch.ones_like(ids), n=n)
                self.assertEqual(raised.exception.status_name, "POOL_FULL")
                cache.reset()
                self.assertEqual(session.lengths(), {})
            ids = self.ids[1:2]
            mask = torch.ones_like(ids)
            self.assert_same(self.generate(cache, ids=ids, mask=mask, n=8), self.generate(ids=ids, mask=mask, n=8))

    def test_a_decode_step_is_one_request_for_each_layer(self):
        """Whatever the batch; and a prompt is not waited for layer by layer."""
        cache = self.cache()
        self.generate(cache, n=1)
        sent = self.note_requests()
        self.model.set_attn_implementation("tqkv")
        mask = torch.cat([self.mask, torch.ones(3, 1, dtype=self.mask.dtype)], dim=1)
        with torch.no_grad():
            self.model(torch.tensor([[5], [6], [7]]), attention_mask=mask, **{CACHE: cache})
        self.assertEqual(sent, [tqkv._wire.APPEND_DECODE] * 3)
        self.assertEqual(np.unique([self.session.lengths()[n] for n in cache.sequences]).tolist(), [14, 18, 21])


if __name__ == "__main__":
    unittest.main()
