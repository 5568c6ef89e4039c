//! The pages for operators in a real browser. See `tests/inspector.rs`.
