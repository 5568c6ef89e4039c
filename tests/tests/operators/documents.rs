//! The documents name what there is: features, stores, files, and the tests of rules.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn workspace() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap()
}

/// The numbers of the rules that are named after `rule` or `rules`.
fn cited(text: &str) -> BTreeSet<u32> {
    let words = text.replace("///", " ").replace("//", " ");
    let after = words.to_lowercase();
    let after = after.split("rule").skip(1);
    let numbers = |rest: &str| {
        let rest = rest.trim_start_matches('s').trim_start();
        let end = rest.find(|c: char| !(c.is_ascii_digit() || ", and".contains(c)));
        let list = rest[..end.unwrap_or(rest.len())].to_owned();
        let number = |part: &str| part.parse().ok();
        list.split(|c: char| !c.is_ascii_digit())
            .filter_map(number)
            .collect::<Vec<u32>>()
    };
    after.flat_map(numbers).collect()
}

#[test]
fn each_rule_of_the_protocol_has_a_test_or_a_mutation() {
    let mut paths = Vec::new();
    for directory in ["lock-runtime", "tests/tests"] {
        files(&workspace().join(directory), &mut paths);
    }
    let is_test = |path: &&String| {
        let parts = ["/tests/", "/sim/", "/conformance/", "/tests.rs"];
        path.ends_with(".rs") && parts.iter().any(|part| path.contains(part))
    };
    let tests = paths.iter().filter(is_test);
    let cited = cited(
        &tests
            .map(|path| fs::read_to_string(path).unwrap())
            .collect::<String>(),
    );
    let mutations = ["protocol/mod.rs", "protocol/majority/mod.rs"];
    let mutations = mutations
        .map(|file| read(&format!("lock-runtime/src/{file}")))
        .concat();
    let protocol = read("docs/PROTOCOL.md");
    let rules: Vec<_> = protocol.split("**Rule ").skip(1).collect();
    assert!(rules.len() > 35, "{}", rules.len());
    for rule in rules {
        let number = rule.split('.').next().unwrap().parse().unwrap();
        // As in "`CountsFromReply`: ..", and in "`Quorum::NoWriteBack`: ..".
        let named = rule.split('`').skip(1).step_by(2);
        let named = named.map(|name| name.trim_start_matches("Quorum::"));
        let mut named = named.filter(|name| name.starts_with(char::is_uppercase));
        let is_mutated = named.any(|name| mutations.contains(&format!("    {name},\n")));
        assert!(
            is_mutated || cited.contains(&number),
            "no test and no mutation is of rule {number}"
        );
    }
}

/// The paths of all files below a directory, apart from those that are built.
fn files(directory: &Path, paths: &mut Vec<String>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            files(&path, paths);
        } else {
            paths.push(path.to_str().unwrap().to_owned());
        }
    }
}

#[test]
fn each_source_that_a_document_names_exists() {
    let mut paths = Vec::new();
    for directory in [
        "lock-runtime",
        "lock-macros",
        "lock-tower",
        "examples",
        "tests",
    ] {
        files(&workspace().join(directory), &mut paths);
    }
    let mut named = 0;
    for document in [
        "README.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs/ARCHITECTURE.md",
        "docs/MAP.md",
        "docs/PROTOCOL.md",
    ] {
        let text = read(document);
        let words = text.split('`').skip(1).step_by(2);
        let is_path =
            |word: &&str| word.ends_with(".rs") && !word.contains([' ', '*', '<', '{', '[']);
        for path in words.filter(is_path) {
            let exists = paths.iter().any(|it| it.ends_with(&format!("/{path}")));
            assert!(exists, "{document} names {path}");
            named += 1;
        }
    }
    assert!(named > 50, "{named}");
}

/// The features of a crate, apart from `default`.
fn features(name: &str) -> BTreeSet<String> {
    let manifest = read(&format!("{name}/Cargo.toml"));
    let (_, features) = manifest.split_once("[features]\n").unwrap();
    let (features, _) = features.split_once("\n[").unwrap();
    let features = features.lines().filter(|line| !line.starts_with('#'));
    let features = features.filter_map(|line| line.split_once(" = "));
    let features = features.map(|(feature, _)| feature.to_owned());
    features.filter(|feature| feature != "default").collect()
}

/// The first cells of the rows of the table that begins with this cell.
fn rows(page: &str, head: &str) -> BTreeSet<String> {
    let (_, table) = page.split_once(&format!("| {head} |")).unwrap();
    let rows = table.lines().skip(2).take_while(|row| row.starts_with('|'));
    let first = |row: &str| row.split('|').nth(1).unwrap().trim().replace('`', "");
    rows.map(first).collect()
}

#[test]
fn each_feature_is_in_the_table_of_its_crate() {
    for name in ["lock-runtime", "lock-tower"] {
        let page = read(&format!("{name}/README.md"));
        // A cell may have several names.
        let cells = rows(&page, "feature");
        let shown = cells.iter().flat_map(|cell| cell.split(", "));
        let shown: BTreeSet<_> = shown.map(str::to_owned).collect();
        assert_eq!(shown, features(name), "{name}");
    }
}

#[test]
fn each_store_of_the_readme_is_on_the_page_of_the_crate() {
    let scheme = |url: &String| url.split(':').next().unwrap().to_owned();
    let pages = ["README.md", "lock-runtime/README.md"];
    let [whole, own] = pages.map(|path| rows(&read(path), "URL"));
    let [whole, own] = [whole, own].map(|urls| urls.iter().map(scheme).collect::<BTreeSet<_>>());
    assert_eq!(whole, own);
    assert!(own.contains("postgres"), "{own:?}");
}

#[test]
fn the_rights_of_a_role_are_the_same_everywhere() {
    let guide = read("lock-runtime/guide/postgres.md");
    let grants = guide
        .lines()
        .filter_map(|line| line.strip_suffix(" to app;"));
    let grants: Vec<_> = grants.collect();
    assert!(grants.len() > 3, "{grants:?}");
    for path in [
        "docs/stores.md",
        "lock-runtime/src/store/postgres/schema.sql",
        "lock-runtime/src/store/postgres/error.rs",
    ] {
        let text = read(path);
        for grant in &grants {
            assert!(text.contains(grant), "{path} lacks {grant}");
        }
    }
}
