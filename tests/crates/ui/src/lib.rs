//! The messages of the compiler for mistakes on locked functions: see `tests/compiler.rs`.
