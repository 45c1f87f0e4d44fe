"""The registry: the spec-config type of every method, by the method's name."""

from vllm_treespec.config.base import MethodConfig
from vllm_treespec.config.eagle_tree import EagleTreeConfig
from vllm_treespec.config.heads import HeadMethodConfig
from vllm_treespec.config.hybrid import HybridConfig
from vllm_treespec.config.lyanna import LyannaConfig
from vllm_treespec.config.medusa_tree import MedusaTreeConfig
from vllm_treespec.config.redrafter import ReDrafterConfig
from vllm_treespec.config.rsd_c import RsdCConfig
from vllm_treespec.config.rsd_s import RsdSConfig
from vllm_treespec.config.sd import SdConfig
from vllm_treespec.config.specinfer import SpecInferConfig
from vllm_treespec.config.spectr import SpecTrConfig
from vllm_treespec.config.suffix_tree import SuffixTreeConfig

# In the order in which messages list them.
TYPES: tuple[type[MethodConfig], ...] = (
    SdConfig,
    RsdCConfig,
    RsdSConfig,
    SpecTrConfig,
    SpecInferConfig,
    SuffixTreeConfig,
    ReDrafterConfig,
    MedusaTreeConfig,
    EagleTreeConfig,
    LyannaConfig,
    HybridConfig,
)
METHODS = {method.method_name(): method for method in TYPES}
# The method that drafts with a head, by kind of head.
HEAD_METHODS = {
    method.HEAD: name
    for name, method in METHODS.items()
    if issubclass(method, HeadMethodConfig)
}
