"""Converts other projects' checkpoints to our names, and ours to theirs."""

from pycls_fast.models.pretrained.fit import Fitted as Fitted
from pycls_fast.models.pretrained.fit import Mismatch as Mismatch
from pycls_fast.models.pretrained.fit import UnknownKind as UnknownKind
from pycls_fast.models.pretrained.fit import fit as fit
from pycls_fast.models.pretrained.names import OURS as OURS
from pycls_fast.models.pretrained.names import to_resnet as to_resnet
from pycls_fast.models.pretrained.names import to_timm_vit as to_timm_vit
from pycls_fast.models.pretrained.read import HUGGING_FACE as HUGGING_FACE
from pycls_fast.models.pretrained.read import ReadWeights as ReadWeights
from pycls_fast.models.pretrained.read import described as described
from pycls_fast.models.pretrained.read import download as download
from pycls_fast.models.pretrained.read import is_hub as is_hub
from pycls_fast.models.pretrained.read import local_file as local_file
from pycls_fast.models.pretrained.read import pinned as pinned
from pycls_fast.models.pretrained.read import read_weights as read_weights
from pycls_fast.models.pretrained.traits import Description as Description
from pycls_fast.models.pretrained.traits import description_of as description_of
