"""Documents become rows of one length; every token is in one of them, exactly once."""

import json
import re

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

import meshlayout as ml
from meshlayout import data
from models.text import ByteTokenizer
from models.transformer import Transformer, TransformerConfig


TEXTS = ["to be", "", "or", "not to be, that is the question", "é", "whether"]

documents_of_tokens = st.lists(
    st.lists(st.integers(0, 300), max_size=20).map(lambda x: np.array(x, np.int64)),
    min_size=1,
    max_size=12,
)
recipes = st.fixed_dictionaries(
    {
        "length": st.integers(1, 9),
        "mode": st.sampled_from(["chunk", "pack"]),
        "open_rows": st.integers(1, 4),
        "separator": st.sampled_from([None, 0, 7]),
        "targets": st.booleans(),
    }
)


def tokens_by_document(rows, num_documents):
    """Every document's tokens, put together from the rows by number and place."""
    found = [{} for _ in range(num_documents)]
    for row in rows:
        at = zip(
            row["tokens"], row["document_ids"], row["document_positions"], strict=True
        )
        for token, document, place in at:
            if document >= 0:
                assert place not in found[document]
                found[document][place] = token
    return [[tokens[place] for place in range(len(tokens))] for tokens in found]


def stacked(rows):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def listed(rows):
    return [{name: leaf.tolist() for name, leaf in row.items()} for row in rows]


def test_chunks_are_the_concatenation_cut_into_rows():
    rows = list(data.pack_sequences(["abc", "defg", "h"], 3))
    assert [bytes(row["tokens"].tolist()) for row in rows] == [b"abc", b"def", b"gh\0"]
    assert [row["weight"].tolist() for row in rows] == [[1] * 3, [1] * 3, [1, 1, 0]]
    assert {name: leaf.dtype for name, leaf in rows[0].items()} == {
        "tokens": "int32",
        "weight": "float32",
    }


def test_packed_rows_keep_documents_whole_and_apart():
    rows = list(data.pack_sequences(["abc", "de", "fgh", "i"], 5, mode="pack"))
    assert listed(rows) == [
        {
            "tokens": [*b"abcde"],
            "segment_ids": [1, 1, 1, 2, 2],
            "positions": [0, 1, 2, 0, 1],
            "weight": [1, 1, 1, 1, 1],
        },
        {
            "tokens": [*b"fghi", 0],
            "segment_ids": [1, 1, 1, 2, 0],
            "positions": [0, 1, 2, 0, 0],
            "weight": [1, 1, 1, 1, 0],
        },
    ]


@pytest.mark.parametrize("open_rows", [1, 2, 64])
def test_targets_of_chunks_are_the_whole_text_one_token_on(open_rows):
    text = "".join(TEXTS)
    rows = data.pack_sequences(TEXTS, 4, targets=True, open_rows=open_rows)
    arrays = stacked(rows)
    encoded, size = text.encode(), len(text.encode())
    assert bytes(arrays["tokens"].reshape(-1)[:size].tolist()) == encoded
    assert bytes(arrays["targets"].reshape(-1)[: size - 1].tolist()) == encoded[1:]
    # All tokens but the first are predicted, once.
    assert arrays["weight"].sum() == size - 1
    assert arrays["targets"].reshape(-1)[size - 1 :].max() == 0


@settings(max_examples=25, deadline=None)
@given(documents=documents_of_tokens, recipe=recipes)
def test_every_token_of_every_document_is_in_one_row_exactly_once(documents, recipe):
    rows = data.pack_sequences(documents, document_ids=True, **recipe)
    separator = recipe["separator"]
    behind = [] if separator is None else [separator]
    expected = [[*document, *behind] for document in documents]
    made = list(rows)
    assert tokens_by_document(made, len(documents)) == expected
    assert {leaf.shape for row in made for leaf in row.values()} <= {
        (recipe["length"],)
    }
    if not recipe["targets"]:
        total = sum(map(len, expected))
        assert sum(row["weight"].sum() for row in made) == total


@settings(max_examples=25, deadline=None)
@given(
    documents=documents_of_tokens, recipe=recipes.filter(lambda r: r["mode"] == "pack")
)
def test_targets_agree_with_the_documents(documents, recipe):
    recipe = {**recipe, "targets": True, "separator": None}
    for row in data.pack_sequences(documents, document_ids=True, **recipe):
        for at in range(recipe["length"]):
            document, place = row["document_ids"][at], row["document_positions"][at]
            has_next = document >= 0 and place + 1 < len(documents[document])
            assert row["weight"][at] == has_next
            assert row["targets"][at] == (
                documents[document][place + 1] if has_next else 0
            )


def generated():
    yield from TEXTS


KINDS = {
    "string array": np.array(TEXTS),
    "bytes": [text.encode() for text in TEXTS],
    "uint8": tuple(np.frombuffer(text.encode(), np.uint8) for text in TEXTS),
    "ints": [list(text.encode()) for text in TEXTS],
    "function": generated,
    "MapDataset": grain.MapDataset.source(TEXTS),
    "IterDataset": grain.MapDataset.source(TEXTS).to_iter_dataset(),
    "filter": grain.MapDataset.source([*TEXTS, "xx"]).filter(lambda x: x != "xx"),
    "DataLoader": grain.DataLoader(
        data_source=TEXTS,
        sampler=grain.samplers.SequentialSampler(
            len(TEXTS), shard_options=grain.sharding.NoSharding()
        ),
        worker_count=0,
    ),
}


@pytest.mark.parametrize("mode", ["chunk", "pack"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_documents_gives_the_rows_of_a_list(kind, mode):
    expected = listed(data.pack_sequences(TEXTS, 7, mode=mode))
    rows = data.pack_sequences(KINDS[kind], 7, mode=mode)
    assert listed(rows) == listed(rows) == expected  # every pass begins anew


def test_a_tokenizer_is_an_object_or_a_function():
    class Words:
        def encode(self, text):
            return [len(word) for word in text.split()]

    expected = [[2, 2, 2, 3], [2, 3, 4, 2], [3, 8, 1, 7]]
    for tokenizer in (Words(), Words().encode):
        for texts in (TEXTS, [text.encode() for text in TEXTS]):
            rows = data.pack_sequences(texts, 4, tokenizer=tokenizer)
            assert stacked(rows)["tokens"].tolist() == expected


@settings(max_examples=20, deadline=None)
@given(st.text())
def test_any_text_comes_back_from_its_tokens(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert (tokens.dtype, tokens.tolist()) == (np.int32, list(text.encode()))
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([255, 97]) == "\ufffda"
    with pytest.raises(ValueError, match="token 256 is not a byte: a ByteTokenizer"):
        tokenizer.decode([97, 256])


def test_documents_without_tokens_give_no_rows():
    assert list(data.pack_sequences(["", ""], 3, mode="pack")) == []


@settings(max_examples=20, deadline=None)
@given(
    documents=documents_of_tokens, recipe=recipes, stop=st.integers(0, 60), again=...
)
def test_a_pass_continues_where_it_stopped(documents, recipe, stop, again: bool):
    kinds = [documents, grain.MapDataset.source(documents).to_iter_dataset()]
    for kind in kinds[: 1 + (stop % 4 == 0)]:
        rows = data.pack_sequences(kind, **recipe)
        before = iter(rows)
        for _ in zip(range(stop), before, strict=False):
            pass
        state = json.loads(json.dumps(before.get_state()))
        rest = listed(before)
        after = iter(rows)
        if again:
            next(after, None)  # a state may be set at any time
        after.set_state(state)
        assert json.loads(json.dumps(after.get_state())) == state
        assert listed(after) == rest


def test_documents_that_are_read_in_order_have_no_position_of_their_own():
    rows = iter(data.pack_sequences(generated, 7, mode="pack", open_rows=2))
    next(rows)
    with pytest.raises(ml.errors.DataError) as error:
        rows.set_state(rows.get_state())
    assert str(error.value) == (
        "these documents can only be read in order. Give a list or a Grain dataset, or "
        "set the state of distribute_dataset's iterator."
    )


@pytest.mark.parametrize(
    ("texts", "length"), [(TEXTS, 8), (TEXTS[:2], 7)], ids=["length", "documents"]
)
def test_a_state_of_other_rows_is_refused(texts, length):
    state = iter(data.pack_sequences(texts, length)).get_state()
    with pytest.raises(ml.errors.DataError, match="the state is of rows packed with"):
        iter(data.pack_sequences(TEXTS, 7)).set_state(state)


WRONG = {
    "length must be a positive integer, got 0.": {"length": 0},
    "remainder must be 'pad' or 'drop', got 'repeat'.": {"remainder": "repeat"},
    "remainder='drop' is for mode='chunk'": {"mode": "pack", "remainder": "drop"},
    "tokenizer must be a function of (text), got 'gpt2'.": {"tokenizer": "gpt2"},
    "the source must be arrays, a list of": {"documents": "text"},
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_arguments_are_refused_at_once(text):
    with pytest.raises(ml.errors.DataError, match=re.escape(text)):
        data.pack_sequences(**{"documents": TEXTS, "length": 4, **WRONG[text]})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"text": "a"}, "document 1 gives {'text': 'a'}; a document is a text, "),
        (np.ones((2, 2), "int32"), "document 1 gives an array of shape (2, 2); a "),
        ([4, -1], "document 1 gives [4, -1]; a document is a text, bytes, or a 1-D "),
        ([2**31], "of integers from 0 to 2147483647."),
    ],
    ids=["dict", "matrix", "negative", "large"],
)
def test_documents_that_are_none_are_refused_by_number(document, message):
    with pytest.raises(ml.errors.DataError, match=re.escape(message)):
        list(data.pack_sequences(["ab", document], 2))


def test_grain_takes_the_rows_and_remembers_their_place():
    rows = data.pack_sequences(grain.MapDataset.source(TEXTS), 4)
    batches = rows.map(lambda row: row["tokens"]).batch(2)
    whole = [batch.tolist() for batch in batches]
    assert np.concatenate(whole).tolist() == stacked(rows)["tokens"].tolist()
    iterator = iter(batches)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    other = iter(batches)
    other.set_state(state)
    assert [batch.tolist() for batch in other] == whole[1:]


@pytest.mark.parametrize("mode", ["chunk", "pack"])
def test_global_batches_hold_the_rows_and_padding_has_no_weight(mode):
    rows = data.pack_sequences(TEXTS, 4, mode=mode, targets=True, open_rows=3)
    whole = stacked(rows)
    num_rows = len(whole["tokens"])
    mesh = ml.create_mesh({"batch": 2, "model": 4})
    dataset = data.distribute_dataset(
        rows, mesh.layout("batch", "model"), global_batch_size=8, epochs=2
    )
    batches = [jax.tree.map(np.asarray, batch) for batch in dataset]
    assert len(batches) % 2 == 0
    for epoch in (batches[: len(batches) // 2], batches[len(batches) // 2 :]):
        for name, leaf in whole.items():
            found = np.concatenate([batch[name] for batch in epoch])
            np.testing.assert_array_equal(found[:num_rows], leaf)
            assert name != "weight" or found[num_rows:].sum() == 0
    spec = dataset.element_spec["tokens"]
    assert (spec.shape, spec.dtype) == ((8, 4), np.int32)
    assert spec.sharding.spec == jax.sharding.PartitionSpec("batch", "model")


SMALL = TransformerConfig(max_length=32, features=32, num_layers=1, mlp_features=64)


def token_losses(model, batch):
    logits = model(batch["tokens"], batch.get("segment_ids"), batch.get("positions"))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])


def test_packed_documents_have_the_losses_that_they_have_alone():
    texts = ["to be", "or", "not to be,", "that is the question"]
    packed = data.pack_sequences(texts, 32, mode="pack", targets=True)
    packed = stacked(packed)
    assert len(packed["tokens"]) < len(texts)
    alone = [stacked(data.pack_sequences([text], 32, targets=True)) for text in texts]
    alone = jax.tree.map(lambda *rows: np.concatenate(rows), *alone)
    model = Transformer(SMALL, rngs=nnx.Rngs(0))
    run = nnx.jit(token_losses)
    one = np.asarray(run(model, packed))[packed["weight"] > 0]
    other = np.asarray(run(model, alone))[alone["weight"] > 0]
    # Float32 sums in another order.
    np.testing.assert_allclose(np.sort(one), np.sort(other), rtol=1e-5)
