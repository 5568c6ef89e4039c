//! The switches of the mutants; in the copy of the library only.
#![allow(missing_docs)]

use std::{
    env,
    fs::{File, OpenOptions},
    io::Write as _,
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

static ACTIVE: LazyLock<usize> = LazyLock::new(|| {
    let mutant = env::var("LOCK_MUTANT");
    mutant.ok().and_then(|it| it.parse().ok()).unwrap_or(usize::MAX)
});
static RECORD: LazyLock<Option<File>> = LazyLock::new(|| {
    let path = env::var_os("LOCK_MUTANTS_RECORD")?;
    OpenOptions::new().append(true).create(true).open(path).ok()
});
static REACHED: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

#[inline]
pub fn on(mutant: usize) -> bool {
    if !REACHED[mutant].load(Relaxed) {
        REACHED[mutant].store(true, Relaxed);
        if let Some(mut record) = RECORD.as_ref() {
            let _ = record.write_all(format!("{mutant}\n").as_bytes());
        }
    }
    *ACTIVE == mutant
}
