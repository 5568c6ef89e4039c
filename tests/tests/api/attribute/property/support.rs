// The common module of the cases of the property test. It is compiled with the cases and not with
// the tests: with `--cfg reference` for functions without the attribute, and without it for the
// locked ones.

use std::{fmt, future::Future, pin::Pin};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Path<T>(pub T);

/// A constant that no key captures. Keys capture `LIMIT`, which is written with marks around it.
pub const COUNT: u64 = 7;

/// The records of a function: tags and texts.
pub type Seen = Vec<(char, String)>;
pub type Call = Pin<Box<dyn Future<Output = Result<Seen, Failure>>>>;

pub fn same<T>(value: T) -> T {
    value
}

pub async fn ready<T>(value: T) -> T {
    value
}

pub fn fine<T>(value: T) -> Result<T, Failure> {
    Ok(value)
}

/// A pattern whose binding the attribute cannot find.
macro_rules! hidden {
    ($name:ident) => {
        $name
    };
}
pub(crate) use hidden;

/// The type of a method's `self`, in the module of the method.
macro_rules! owner {
    () => {
        #[derive(Clone, Copy, PartialEq)]
        pub struct Owner(u64);

        impl ::std::fmt::Display for Owner {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                crate::support::marked(f, |f| f.pad("the:owner"))
            }
        }

        impl ::std::fmt::Debug for Owner {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                crate::support::marked(f, |f| f.pad("Owner"))
            }
        }
    };
}
pub(crate) use owner;

fn printed(case: &str, seen: Seen) {
    let fields = seen.iter().map(|(tag, text)| {
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        format!(" {tag}{hex}")
    });
    println!("< {case}{}", fields.collect::<String>());
}

#[cfg(reference)]
pub use reference::*;

/// Values that `format!` writes between marks, to distinguish them from the text around them.
#[cfg(reference)]
mod reference {
    use super::*;
    use std::fmt::Write as _;

    #[derive(Clone, Copy, PartialEq)]
    pub struct Marked<'a, T: ?Sized>(pub &'a T);

    pub const LIMIT: Marked<'static, u64> = Marked(&7);

    pub fn marked(f: &mut fmt::Formatter<'_>, write: impl FnOnce(&mut fmt::Formatter<'_>) -> fmt::Result) -> fmt::Result {
        f.write_char('\u{E000}')?;
        write(f)?;
        f.write_char('\u{E001}')
    }

    macro_rules! mark {
        ($($trait:ident)*) => {$(
            impl<T: fmt::$trait + ?Sized> fmt::$trait for Marked<'_, T> {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    marked(f, |f| fmt::$trait::fmt(self.0, f))
                }
            }
        )*};
    }
    mark!(Display Debug LowerHex UpperHex Octal Binary LowerExp UpperExp);

    pub struct Failure;

    pub fn run(cases: &[(&str, fn() -> Call)]) {
        for (case, call) in cases {
            println!("> {case}");
            let mut call = call();
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            match call.as_mut().poll(&mut cx) {
                std::task::Poll::Ready(Ok(seen)) => printed(case, seen),
                _ => panic!("the functions of a case neither wait nor fail"),
            }
        }
    }
}

#[cfg(not(reference))]
pub use locked::*;

#[cfg(not(reference))]
mod locked {
    use super::*;
    use lock_runtime::{HeldLock, LockClient, LockError, LockKey, is_held};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// The runtime under another path.
    pub use lock_runtime as elsewhere;

    pub const LIMIT: u64 = 7;

    pub fn marked(f: &mut fmt::Formatter<'_>, write: impl FnOnce(&mut fmt::Formatter<'_>) -> fmt::Result) -> fmt::Result {
        write(f)
    }

    pub struct Failure(LockError);

    impl From<LockError> for Failure {
        fn from(error: LockError) -> Self {
            Self(error)
        }
    }

    /// Whether the caller holds each of these keys.
    pub fn held(keys: &[&str]) -> Seen {
        let held = |key: &&str| LockKey::new(*key).is_ok_and(|key| is_held(&key));
        keys.iter().map(|key| ('h', held(key).to_string())).collect()
    }

    pub fn guarded(lock: &HeldLock) -> (char, String) {
        ('g', lock.key().to_string())
    }

    pub fn run(cases: &[(&str, &[&str], fn() -> Call)]) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let locks = LockClient::in_memory();
        for (case, keys, call) in cases {
            println!("> {case}");
            let outcome = catch_unwind(AssertUnwindSafe(|| runtime.block_on(locks.as_default(call()))));
            let mut seen = match outcome {
                Ok(Ok(seen)) => seen,
                Ok(Err(Failure(error))) => vec![('!', format!("{:?}", error.kind()))],
                Err(_) => vec![('p', String::new())],
            };
            for key in *keys {
                let left = runtime.block_on(locks.inspect(*key).into_future()).map_or(0, |found| found.holders.len());
                seen.extend((left > 0).then(|| ('l', key.to_string())));
            }
            printed(case, seen);
        }
    }
}
