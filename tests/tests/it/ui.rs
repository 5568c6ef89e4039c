//! What the attribute says to somebody who made one mistake.

#[test]
fn every_mistake_on_a_locked_function_says_what_to_write() {
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*.rs");
}
