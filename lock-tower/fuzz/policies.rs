//! Policy files.

use http::{Method, Request};

use super::LockPolicies;
use crate::{
    fuzz::{is_readable, within_bounds},
    selector::Selector as _,
};

/// A file, and the paths of requests behind its last line `---`.
#[test]
fn files() {
    bolero::check!().for_each(|input: &[u8]| {
        let text = String::from_utf8_lossy(input);
        let (file, paths) = text.rsplit_once("\n---\n").unwrap_or((&text, ""));
        within_bounds(input, || match LockPolicies::from_toml_str(file) {
            Err(error) => {
                assert!(!error.all().is_empty(), "{error}");
                assert_eq!(error.to_string().lines().count(), error.all().len());
                for mistake in error.all() {
                    is_readable(&mistake.message);
                    let line = file.split('\n').nth(mistake.line - 1).expect("a line");
                    assert!(mistake.column <= line.chars().count() + 1, "{mistake:?}");
                }
            }
            Ok(policies) => {
                for path in paths.lines() {
                    let Ok(mut request) = Request::post(path).body(()) else {
                        continue;
                    };
                    policies.find(&Method::GET, path);
                    if let Err(error) = policies.select(&mut request, |_| None).1 {
                        is_readable(&error);
                    }
                }
            }
        });
    });
}
