"""Types that sections of the configuration are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Pixels = Annotated[int, Field(ge=1, le=8192)]
Fraction = Annotated[FiniteFloat, Field(ge=0, le=1)]
Above0 = Annotated[FiniteFloat, Field(gt=0)]
AtLeast0 = Annotated[FiniteFloat, Field(ge=0)]
BelowOne = Annotated[FiniteFloat, Field(ge=0, lt=1)]
Temperature = Annotated[FiniteFloat, Field(ge=1e-3, le=1e3)]
Channels = tuple[FiniteFloat, FiniteFloat, FiniteFloat]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
