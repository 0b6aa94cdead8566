"""Structured Gaussians over a layer's weight matrix: distributions like any other, built on demand."""

from .diagonal import DiagonalNormal as DiagonalNormal
from .grouped import GroupedNormal as GroupedNormal
from .inverse_wishart import InverseWishart as InverseWishart
from .k_tied import KTiedNormal as KTiedNormal
from .kronecker import EigenKroneckerNormal as EigenKroneckerNormal
from .kronecker import KroneckerNormal as KroneckerNormal
from .matrix_normal import MatrixNormal as MatrixNormal
from .matrix_normal_inverse_wishart import MatrixNormalInverseWishart as MatrixNormalInverseWishart
from .selection import EigenvalueSelection as EigenvalueSelection
from .selection import select as select
from .sparse_information import SparseInformationNormal as SparseInformationNormal
from .structured import StructuredNormal as StructuredNormal
