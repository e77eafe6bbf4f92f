import numpy as np
from numpy.typing import NDArray

def pack(
    first: NDArray[np.int32], end: NDArray[np.int32], size: NDArray[np.int64], order: NDArray[np.int32]
) -> NDArray[np.int64]: ...
