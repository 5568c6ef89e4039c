//! Messages for mistakes in policy files: each `corpus/policies/*.toml` has one mistake, and the
//! `.txt` beside it is the expected message. `UPDATE=1` writes the messages anew.

use std::{env, fs, path::Path};

use lock_tower::LockPolicies;

pub(super) const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/corpus/policies");

/// The files with more than one message.
const SEVERAL: [&str; 2] = ["many_mistakes.toml", "yaml.toml"];

#[test]
fn every_mistake_has_the_error_in_the_corpus() {
    let update = env::var_os("UPDATE").is_some();
    let mut files: Vec<_> = fs::read_dir(CORPUS)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let mut wrong = Vec::new();
    for file in files
        .iter()
        .filter(|file| file.extension().is_some_and(|ending| ending == "toml"))
    {
        let text = fs::read_to_string(file).unwrap();
        let told = LockPolicies::from_toml_str(&text)
            .err()
            .map(|error| format!("{error}\n"));
        let beside = file.with_extension("txt");
        if update {
            match &told {
                Some(told) => fs::write(&beside, told).unwrap(),
                None => fs::remove_file(&beside).unwrap_or_default(),
            }
        }
        let expected = fs::read_to_string(&beside).ok();
        if told != expected {
            wrong.push(format!(
                "{}\n  yields {told:?}\n  instead of {expected:?}",
                file.display()
            ));
        }
        let mistakes = told.map_or(0, |told| told.lines().count());
        if mistakes > 1 && !SEVERAL.iter().any(|several| file.ends_with(several)) {
            wrong.push(format!(
                "{}\n  yields {mistakes} messages for one mistake",
                file.display()
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "UPDATE=1 accepts these messages:\n{}",
        wrong.join("\n")
    );
    assert!(
        files
            .iter()
            .filter(|file| file.extension().is_some_and(|ending| ending == "txt"))
            .all(|file| { Path::new(file).with_extension("toml").is_file() })
    );
}

#[test]
fn the_readme_shows_the_file_of_the_example() {
    let readme = include_str!("../../../../../lock-tower/README.md");
    let example = include_str!("../../../../../examples/src/bin/orders/locks.toml");
    assert!(
        readme.contains(&format!("```toml\n{example}```\n")),
        "the policies in the README are not those of `orders`"
    );
}
