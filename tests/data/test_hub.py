"""Data from the Hub, fetched by the real clients from the loopback server."""

from __future__ import annotations

from io import BytesIO

from loopback_hub import Hub


def test_a_dataset_is_loaded_from_the_hub(hub: Hub, table) -> None:
    files = {}
    for split, count in (("train", 60), ("test", 21)):
        buffer = BytesIO()
        table(count).to_parquet(buffer)
        files[f"data/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    hub.repository("ada/insects", files, kind="dataset", private=True)
    code = """
    import datasets
    from hf_retarget.data import Preprocess, load_data
    from hf_retarget.recipe.options import DataOptions
    datasets.disable_progress_bars()
    sha = api.dataset_info("ada/insects", token="hf_ada_write").sha
    gray = Preprocess.of({"input_size": (1, 8, 8)})
    def load(reference, token="hf_ada_write", **options):
        return load_data(reference, DataOptions(**options), gray, token=token)
    forbidden = failure(load, "ada/insects", token=False)  # first: later, `datasets` would take it from its cache
    data, pinned = load("ada/insects"), load(f"ada/insects@{sha}")
    sizes = [len(data.train), len(data.validation), len(data.test)]
    same = data.fingerprint == pinned.fingerprint
    missing = [failure(load, "ada/insect"), failure(load, "ada/insects", revision="nowhere"),
               failure(load, "ada/insects", config="large"), forbidden]
    answer([sizes, data.labels, data.revision == pinned.revision == sha, same, missing])
    """
    sizes, labels, revisions_agree, same, missing = hub.client().ask(code)
    assert sizes == [54, 6, 21]
    assert labels == ["ant", "bee", "cat"]
    assert revisions_agree
    assert same
    absent, revision, config, forbidden = missing
    for message in (absent, forbidden):
        assert "doesn't exist on the Hub or cannot be accessed; nor is it a local file or folder" in message
    assert revision == (
        "DataError: dataset 'ada/insects' cannot be loaded from the Hub: "
        "Revision 'nowhere' doesn't exist for dataset 'ada/insects' on the Hub"
    )
    assert config.endswith("BuilderConfig 'large' not found. Available: ['default']")
