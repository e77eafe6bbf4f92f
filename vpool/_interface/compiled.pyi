from typing_extensions import CapsuleType

capi: CapsuleType
