"""Port every fine-tuned model of an organisation to a new base; run it again and it continues where it stopped.

python port_organisation.py --organisation lab --old-base timm/resnet18.tv_in1k --new-base timm/resnet18.a1_in1k
"""

import argparse
import sys

import yaml
from huggingface_hub import HfApi, ModelInfo

import hf_retarget as rt


def main() -> int:
    """Find the models, check each before anything large is downloaded, and port those that can be."""
    arguments = parse()
    overrides = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in arguments.set)}
    found = HfApi().list_models(
        author=arguments.organisation, filter=f"base_model:finetune:{arguments.old_base}", expand=["cardData"]
    )
    jobs, refused = [], 0
    for model in sorted(found, key=lambda model: model.id):
        data = data_of(model) or arguments.data
        try:
            check = rt.check(arguments.old_base, model.id, arguments.new_base, data, overrides=overrides)
            problems = (
                check.problems
                if data
                else (
                    *check.problems,
                    "its card names no dataset; say --data",
                )
            )
        except rt.RetargetError as error:
            problems = (str(error),)
        if problems:
            refused += 1
            print(f"{model.id}: not ported: {problems[0]}")
        else:
            print(f"{model.id}: {check.download / 1e6:.1f} MB to download, {check.graph.groups} groups to match")
            jobs.append(rt.PortJob(model.id, data=data))
    if not jobs:
        print("nothing to port")
        return int(refused > 0)
    done = rt.port_all(
        arguments.old_base,
        arguments.new_base,
        jobs,
        out=arguments.out,
        overrides=overrides,
        reuse_permutation=arguments.reuse_permutation,
    )
    for each in done.outcomes:
        print(f"{each.model}: {each.status}: {each.error or each.verdict}")
    return int(refused > 0 or bool(done.failed))


def data_of(model: ModelInfo) -> str | None:
    """The first dataset that a model's card names."""
    named = (model.card_data.datasets if model.card_data else None) or []
    return named if isinstance(named, str) else next(iter(named), None)


def parse() -> argparse.Namespace:
    """What the user said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--organisation", required=True)
    parser.add_argument("--old-base", required=True)
    parser.add_argument("--new-base", required=True)
    parser.add_argument("--data", help="for models whose card names no dataset")
    parser.add_argument("--out", default="ported")
    parser.add_argument("--reuse-permutation", action="store_true", help="search once, for the first model")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipe: port.steps=15"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
