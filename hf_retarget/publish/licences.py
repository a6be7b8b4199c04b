"""Which licences the Hub knows by name; any other is `other`, with its own name beside it."""

from __future__ import annotations

_NAMES = """
afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0
etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 h-research
intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other pddl postgresql unlicense
wtfpl zlib
"""
LICENCES = frozenset(_NAMES.split())


def describe_licence(name: str | None, link: str | None = None) -> dict[str, str]:
    """The entries of a card for a licence; none if it is not known: a licence is never made up.

    Example:
        >>> describe_licence("MIT"), describe_licence("dinov3-license"), describe_licence("unknown")
        ({'license': 'mit'}, {'license': 'other', 'license_name': 'dinov3-license'}, {})
    """
    known = (name or "").strip().lower()
    if known in ("", "unknown", "none"):
        return {}
    if known in LICENCES:
        return {"license": known}
    return {"license": "other", "license_name": known.replace(" ", "-"), **({"license_link": link} if link else {})}
