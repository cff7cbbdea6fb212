"""The long-context adapter: its data, its network and its file, on a random model of two layers."""

import copy

import numpy as np
import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SPECIAL = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture
def byte_tokenizer():
    """One token a byte, and SmolLM2's two marks of a turn."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


@pytest.fixture
def text(module_of, monkeypatch, tmp_path, byte_tokenizer):
    """The Text of a few lines of source, through build and read."""
    module = module_of("long_context_text")
    source = '"""{}"""\n{}'.format("Long enough to be prose.\n" * 20, "x = 1\n" * 200)
    monkeypatch.setattr(module, "sources", lambda: [source])
    lines = "Held out is this line.\n" * 40
    monkeypatch.setattr(module, "held_out", lambda tokenizer, kind: tokenizer.encode(lines))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer)
    module.build(wrapped, tmp_path / "text.npz", most_tokens=4000)
    return module.read(tmp_path / "text.npz")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=128, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, vocab_size=300, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5}, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def network(module_of, model):
    return module_of("long_context_network").Network(model, theta=1e5)


@pytest.fixture
def changed(module_of, network):
    """An adapter that changes something."""
    adapter = module_of("long_context_adapter").Adapter(network.projections, Hq=6, rank=4)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return adapter


@pytest.mark.parametrize("L", [900, 3000])
def test_a_training_sequence_answers_what_it_told_before(module_of, text, L):
    sequences = module_of("long_context_sequences")
    for number in range(8):
        made = sequences.train_sequence(text, L, seed=3, number=number)
        again = sequences.train_sequence(text, L, seed=3, number=number)
        assert np.array_equal(made.ids, again.ids)
        assert made.ids.shape == made.plain.shape == (L,)
        assert made.answers
        for start, stop in made.answers:
            answer = text.tokenizer.decode(made.ids[start:stop].tolist()).strip()
            told = text.tokenizer.decode(made.ids[:start].tolist())
            assert answer in told
            assert not made.plain[start:stop].any()


def test_a_probe_has_its_facts_at_the_depths_asked_for(module_of, text):
    sequences = module_of("long_context_sequences")
    depths = np.array([0.1, 0.5, 0.9])
    found = sequences.probe(text, 3000, depths=depths, kind="code", seed=1)
    told = text.tokenizer.decode(found.prefix.tolist())
    longest = max(len(ids) for ids, _, _ in found.questions)
    assert len(found.prefix) + longest == 3000
    for ids, start, depth in found.questions:
        answer = text.tokenizer.decode(ids[start:].tolist()).strip()
        assert told.index(answer) / len(told) == pytest.approx(depth, abs=0.1)


def test_wordings_for_evaluation_are_not_trained_on(module_of):
    facts = module_of("long_context_facts")
    fact = facts.Fact("ticket", "copper lantern", "4711")
    rng = np.random.default_rng(0)
    trained = {facts.say(rng, fact) for _ in range(300)}
    held_out = {facts.say(rng, fact, held_out=True) for _ in range(50)}
    assert len(trained) == len(facts.SAYINGS) - facts.HELD_OUT
    assert len(held_out) == facts.HELD_OUT
    assert not trained & held_out


def test_the_network_is_the_transformers_model(model, network):
    ids = torch.randint(300, (2, 130))
    with torch.no_grad():
        got = network.logits(network.hidden(ids, network.projections))
        torch.testing.assert_close(got, model(ids).logits)


def test_continuations_of_one_prefix_do_not_see_each_other(network):
    prefix, tails = torch.randint(300, (1, 90)), torch.randint(300, (3, 7))
    caches, weights = [], network.projections
    with torch.no_grad():
        network.hidden(prefix, weights, on_keys=lambda k, v: caches.append((k, v)))
        got = network.follow(tails, weights, caches)
        want = network.hidden(torch.cat([prefix.expand(3, -1), tails], 1), weights)[:, 90:]
    torch.testing.assert_close(got, want)


def test_a_new_adapter_changes_nothing(module_of, network):
    adapter = module_of("long_context_adapter").Adapter(network.projections, Hq=6)
    for old, new in zip(network.projections, adapter.merged(network.projections), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def test_a_saved_adapter_gives_identical_logits(module_of, model, network, changed, tmp_path):
    module, path = module_of("long_context_adapter"), tmp_path / "a.safetensors"
    changed.save(path, module.Facts(3e6, 4096, ({"steps": 7},)))
    read, facts = module.Adapter.read(path, network.projections)
    assert facts == module.Facts(3e6, 4096, ({"steps": 7},))
    wide = module_of("long_context_network").Network(model, theta=facts.rope_theta)
    ids = torch.randint(300, (1, 200))
    with torch.no_grad():
        wanted = wide.logits(wide.hidden(ids, changed.merged(wide.projections)))
        assert torch.equal(wide.logits(wide.hidden(ids, read.merged(wide.projections))), wanted)
        before = model(ids).logits
        module_of("long_context_model").merge(model, path)
        torch.testing.assert_close(model(ids).logits, wanted)
    assert not torch.allclose(before, wanted, atol=1e-3)
    assert model.config.rope_parameters["rope_theta"] == 3e6
    assert model.config.max_position_embeddings == 4096


def test_an_adapter_of_another_model_is_refused(module_of, network, changed, tmp_path):
    module, path = module_of("long_context_adapter"), tmp_path / "a.safetensors"
    changed.save(path, module.Facts(3e6, 4096))
    with pytest.raises(ValueError, match="2 layers, the model 1"):
        module.Adapter.read(path, network.projections[:1])


def test_training_lowers_the_loss_of_the_answers(module_of, text, network):
    training = module_of("long_context_training")
    adapter = module_of("long_context_adapter").Adapter(network.projections, Hq=6, rank=8)
    start = copy.deepcopy(adapter.state_dict())
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    batch = training.make_batch(text, length=256, tokens=512, plain=64, seed=0, number=0)
    assert batch.ids.shape == (2, 256)
    seen = []
    for _ in range(8):
        merged = adapter.merged(network.projections)
        loss, answers, _, right, count = training.loss_of(network, merged, batch, plain_weight=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(answers))
    assert 0 <= float(right) <= count
    assert seen[-1] < 0.9 * seen[0]
    assert all(not torch.equal(x, start[name]) for name, x in adapter.state_dict().items())


def test_a_greedy_answer_counts_only_in_full(module_of, text, network):
    evaluation, sequences = (module_of(f"long_context_{x}") for x in ("eval", "sequences"))
    found = sequences.probe(text, 500, depths=np.array([0.2, 0.7]), kind="prose", seed=2)
    weights = network.projections
    assert not any(evaluation.answered(network, weights, found, "cpu"))
    # the answers that this model does give
    questions = []
    with torch.no_grad():
        for ids, start, depth in found.questions:
            ids = ids.copy()
            for at in range(start, len(ids)):
                seen = torch.from_numpy(np.concatenate([found.prefix, ids[:at]]))[None]
                ids[at] = network.logits(network.hidden(seen, weights)[0, -1]).argmax()
            questions.append((ids, start, depth))
    greedy = sequences.Probe(found.prefix, questions, "prose")
    assert evaluation.answered(network, weights, greedy, "cpu") == [True, True]
    ids, start, depth = questions[1]
    spoilt = np.append(ids[:-1], (ids[-1] + 1) % 256)
    questions[1] = spoilt, start, depth
    assert evaluation.answered(network, weights, greedy, "cpu") == [True, False]


def test_the_curriculum_follows_the_time(module_of):
    training = module_of("long_context_training")
    plan = training.phases("512:1 1024:3")
    assert [phase.until for phase in plan] == [0.25, 1.0]
    assert {training.length_at(plan, 0.2, n, 0) for n in range(50)} == {512}
    later = [training.length_at(plan, 0.5, n, 0) for n in range(200)]
    assert 0.6 < later.count(1024) / 200 < 0.9
    assert training.rate_at(training.WARM_UP) == pytest.approx(1.0)
    assert training.rate_at(1.0) == pytest.approx(training.LAST_LR)


def test_the_interval_is_wilsons(module_of):
    low, high = module_of("long_context_eval").interval(26, 32)
    assert (low, high) == pytest.approx((0.6469, 0.9111), abs=1e-3)
