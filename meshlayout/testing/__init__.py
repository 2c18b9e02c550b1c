"""For your tests: single-device numbers, expected layouts and communication.

Use it as `ml.testing`. Test runners show a `VerificationError` like a failed assertion.
"""

from meshlayout.testing.verification import (
    Difference as Difference,
    Verification as Verification,
    VerificationError as VerificationError,
    assert_layout as assert_layout,
    expect_communication as expect_communication,
    verify as verify,
)
