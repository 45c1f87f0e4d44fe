"""Spec-configs that are refused: one message names the key and the remedy."""

import json

import pytest

from tests.fast.tables import assert_says, rows
from vllm_treespec.config import SpecConfigError, parse_spec_config

# A method and keys, for a model named "d"; without a method, all keys.
REFUSED = rows("""
{"method": "rsd-s"} => 'rsd-s' (did you mean 'rsd_s'?); write one of sd, rsd_c
{"method": "RSD_S"} => 'RSD_S' (did you mean 'rsd_s'?)
{"method": "zzz"} => 'method' is 'zzz'; write one of sd, rsd_c, rsd_s
{"method": ["sd"]} => 'method' is ['sd']; write a name, one of sd
{"method": null, "depth": 3} => 'method' is missing; write one of sd, rsd_s
{} => 'method' is missing; write one of sd, rsd_c
{"model": "d", "beam_width": 4, "depth": 3} => 'method' is missing; write one of rsd_s
{"method": "suffix", "num_drafts": 16, "depth": 12} => 'suffix', a method of vLLM's own,
    which needs no treespec; draft trees of this kind are 'suffix_tree'
{"method": "medusa", "model": "/head", "max_trees": 4} => draft trees of this kind are
    'medusa_tree'
{"method": "ngram"} => of this kind are 'suffix_tree'
{"method": "eagle3", "model": "d"} => of this kind are 'eagle_tree'
{"method": "dspark", "model": "d"} => of this kind are 'dflash_tree'
{"method": "draft_model", "model": "d"} => of this kind are 'rsd_s'
{"method": "mtp"} => other methods of vLLM's own are for `vllm serve` alone
{"method": "sd", "model": DEEP} => 'model' is [[[[[[[...]]]]]]]: Input
{"method": DEEP} => 'method' is [[[[[[[...]]]]]]]; write a name
{"method": "sd", "depth": 3} => 'model' is missing; add it
{"method": "specinfer"} => 'drafts' is missing
sd {"depth": 0} => 'depth' is 0
sd {"depth": 3.0} => 'depth' is 3.0
sd {"depth": "deep"} => 'depth' is 'deep'
sd {"depth": 64} => 'depth' is 64
sd {"depth": 3, "k": 1} => 'k' is not a key
sd {"depth": 3, "max_trees": 0} => 'max_trees' is 0
suffix_tree {"max_slowdown": 1.0} => 'max_slowdown' is 1.0
suffix_tree {"max_slowdown": 3, "schedule": "fixed"} => remove it, or 'schedule'
rsd_c {"branching_factors": []} => 'branching_factors'
rsd_c {"branching_factors": [true]} => 'branching_factors.0' is True
rsd_c {"branching_factors": [4, 4, 4]} => 84 draft tokens and at most 63 fit; lower
    branching_factors
rsd_s {"beam_width": true} => 'beam_width' is True
rsd_s {"beam_width": 16, "depth": 4} => 64 draft tokens and at most 63 fit; lower
    beam_width, depth
rsd_s {"num_speculative_tokens": 3} => 'num_speculative_tokens' is for vLLM's own
    methods; write 'beam_width', 'depth' (
rsd_s {"schedule": []} => 'schedule' is empty
rsd_s {"schedule": "never"} => 'measured' or 'fixed'
rsd_s {"schedule": [{"batch_size": 0}]} => batch_size
rsd_s {"schedule": [{"beam_width": 2}]} => 'schedule.0.batch_size' is missing; add it
rsd_s {"schedule": [{"batch_size": 2, "width": 2}]} => write beam_width, depth
rsd_s {"depth": 3, "schedule": [{"batch_size": 2, "beam_width": 40}]} => at most 63 fit
rsd_s {"schedule": [{"batch_size": 2, "beam_width": "x"}]} => beam_width is wrong
rsd_s {"schedule": [{"batch_size": 2, "min_acceptance_length": 0.5}]} =>
    min_acceptance_length
suffix_tree {"num_drafts": 0} => 'num_drafts' is 0
suffix_tree {"num_drafts": 64} => 'num_drafts' is 64
suffix_tree {"model": "d"} => 'model' is not a key
suffix_tree {"max_match": 0} => 'max_match' is 0
suffix_tree {"max_cached_tokens": -1} => 'max_cached_tokens' is -1
suffix_tree {"num_draft": 3} => remove it, or write 'num_drafts'
suffix_tree {"num_speculative_tokens": 3} => 'num_speculative_tokens' is for vLLM's own
    methods; write 'num_drafts' (
suffix_tree {"schedule": "default"} => 'suffix_tree': 'schedule' is 'default': Input
    should be 'measured' or 'fixed' (
suffix_tree {"schedule": [{"batch_size": true}]} => batch_size' is True
suffix_tree {"schedule": [{"batch_size": 1, "min_acceptance_length": NaN}]} =>
    min_acceptance_length' is nan
suffix_tree {"max_trees": true} => 'max_trees' is True
suffix_tree {"max_cached_tokens": true} => tokens' is True
suffix_tree {"lossy_typical_acceptance": true} => write one such as {"epsilon": 0.09,
    "delta": 0.3} (
suffix_tree {"lossy_typical_acceptance": {"epsilon": 0.1, "delta": Infinity}} => delta'
    is inf
suffix_tree {"lossy_typical_acceptance": {"epsilon": 0.1, "delta": NaN}} => delta' is
    nan
suffix_tree {"lossy_typical_acceptance": {"epsilon": 0.1, "delta": true}} => delta' is
    True
suffix_tree {"lossy_typical_acceptance": {"epsilon": NaN, "delta": 0.3}} => epsilon' is
    nan
redrafter {"length": 0} => 'length' is 0
redrafter {"num_drafts": 64} => 'num_drafts' is 64
redrafter {"num_drafts": 0} => 'num_drafts' is 0
redrafter {"beams": 3} => 'beams' is not a key of this method; remove it
redrafter {"beam_search": "stochastic", "num_drafts": 8} => 'num_drafts' is 8: a
    stochastic beam keeps all beam_width x length draft tokens; remove 'num_drafts'
redrafter {"beam_search": "stochastic", "tree": "dynamic"} => 'tree' is 'dynamic': a
    dynamic tree holds the likeliest tokens and a stochastic beam drawn ones; remove
    'tree', or write 'beam_search' 'deter
redrafter {"tree": "static"} => 'tree' is 'static': Input should be 'beams' or 'dynami
redrafter {"beam_search": "stochastic", "beam_width": 32} => 64 draft tokens and at most
    63 fit; lower beam_width, length
redrafter {"schedule": [{"batch_size": 2, "beam_search": "stochastic"}]} =>
    'beam_search', which does not shape a redrafter tree
eagle_tree {"top_k": 0} => 'top_k' is 0
eagle_tree {"depth": 64} => 'depth' is 64
eagle_tree {"num_drafts": 64} => 'num_drafts' is 64
eagle_tree {"beam_width": 4} => 'beam_width' is not a key of this method; remove it
eagle_tree {"tree": "beams"} => 'tree' is 'beams': Input should be 'dynamic', 'static'
eagle_tree {"hot_tokens": ""} => 'hot_tokens' is ''
eagle_tree {"num_drafts": null} => 'num_drafts' is None: null keeps all that was drawn,
    and only a stochastic tree is drawn; write a number such as 8, or 'tree' 'stoch
eagle_tree {"tree": "static", "num_drafts": null} => write a number such as 8
eagle_tree {"tree": "stochastic", "num_drafts": null, "top_k": 9, "depth": 8} => the
    tree has 72 draft tokens and at most 63 fit; lower top_k, depth
eagle_tree {"top_k": 40, "num_drafts": 63} => 'eagle_tree': the model reads 80 nodes of
    a tree, top_k x (depth - 1), and
eagle_tree {"top_k": 10, "depth": 8, "num_drafts": 60} => the model reads 70 nodes of a
    tree, top_k x (depth - 1), and at most 63 fit; lower 'top_k' or 'depth'
eagle_tree {"schedule": [{"batch_size": 2, "num_drafts": null}]} => 'schedule' has an
    entry in which num_drafts is wrong
eagle_tree {"schedule": [{"batch_size": 2, "tree": "static"}]} => 'tree', which does not
    shape a eagle_tree tree; write top_k, depth, num
dflash_tree {"depth": 63} => 'depth' is 63
dflash_tree {"tree": "static"} => 'tree' is 'static': Input should be 'dynamic' or
lyanna {"top_k": 0} => 'top_k' is 0
lyanna {"depth": 64} => 'depth' is 64
lyanna {"num_drafts": 64} => 'num_drafts' is 64
lyanna {"resample_min_levels": 0} => 'resample_min_levels' is 0
lyanna {"hot_tokens": "x"} => 'hot_tokens' is not a key of this method; remove it
lyanna {"tree": "static"} => 'tree' is 'static': Input should be 'dynamic' or 'stoch
lyanna {"resample": true} => Input should be 'off', 'replace' or 'merge'
lyanna {"num_drafts": null} => 'num_drafts' is None: null keeps all that was drawn, and
    only a stochastic tree is drawn; write a number such as 12, or 'tree' 'stoch
lyanna {"resample_drafts": 3} => 'resample_drafts' is 3: it is for 'resample' 'merge'
lyanna {"tree": "stochastic", "resample": "merge"} => 'resample' is 'merge': a
    stochastic tree is drawn from one chain, and a merged one holds the likeliest tokens
    of two; write 'resample' 'replace', or 'tree' 'dynamic'
lyanna {"resample": "merge", "num_drafts": 60, "top_k": 8} => the tree has 64 draft
    tokens and at most 63 fit; lower top_k, depth, num_drafts, resample_drafts
lyanna {"schedule": [{"batch_size": 2, "resample": "off"}]} => 'resample', which does
    not shape a lyanna tree; write top_k, depth, num
specinfer {"drafts": []} => 'drafts' is []
specinfer {"drafts": [{"branching_factors": [2]}]} => 'drafts.0.model' is missing
specinfer {"drafts": [{"model": "d", "branchin": [2]}]} => 'drafts.0.branchin' is not a
    key of this method; remove it (its keys
specinfer {"drafts": DRAFTS, "model": "d"} => 'model' is not a key of this method
specinfer {"drafts": [{"model": "d", "branching_factors": [8, 8]}]} => 72 draft tokens
    and at most 63 fit; lower drafts
specinfer {"drafts": DRAFTS, "schedule": [{"batch_size": 1, "drafts": [{"model": "one",
    "branching_factors": [2, 2]}]}]} => write ['one', 'other'], only the branching
    factors may differ
spectr {"num_paths": 0, "depth": 2} => 'num_paths' is 0
spectr {"num_paths": 8, "depth": 8} => 64 draft tokens and at most 63 fit; lower num
spectr {"num_paths": 2, "depth": 2, "scorer": "sd"} => 'scorer' is 'sd'
hybrid {"model": null} => 'model' is None
hybrid {"drafter": "medusa"} => 'drafter' is 'medusa': Input should be 'draft_model',
    'redrafter', 'eagle', 'dflash' or 'lyanna'
hybrid {"sure_match": 8} => 'sure_match' is not a key of this method; remove it (its
hybrid {"num_drafts": 64} => 'num_drafts' is 64
hybrid {"model_depth": -1} => 'model_depth' is -1
hybrid {"model_depth": true} => 'model_depth' is True
hybrid {"top_k": 8, "model_depth": 9} => lower 'top_k' or 'model_depth'
hybrid {"hot_token": "file"} => 'hot_token' is not a key of this method
hybrid {"drafter": "eagle", "hot_tokens": "other.json"} => 'hot_tokens' is for draft
    models
""")
DEEP = "[" * 900 + "]" * 900
DRAFTS = """[{"model": "one", "branching_factors": [2, 2]},
    {"model": "other", "branching_factors": [1, 1, 1]}]"""


@pytest.mark.parametrize(("given", "says"), REFUSED)
def test_refusals_name_key_and_remedy(given: str, says: str) -> None:
    """Red when bad input is accepted, or refused without naming key and remedy."""
    method, keys = given.replace("DEEP", DEEP).split("{", 1)
    keys = keys.replace("DRAFTS", DRAFTS)
    spec = json.loads("{" + keys)
    if method.strip():
        without = ("suffix_tree ", "specinfer ")
        model = {} if method in without else {"model": "d"}
        spec = {"method": method.strip(), **model, **spec}
    with pytest.raises(SpecConfigError) as error:
        parse_spec_config(spec)
    assert_says(error.value, says)
