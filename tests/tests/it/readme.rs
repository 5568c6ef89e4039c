//! The pages of the crates on crates.io: what they list is what there is.

use std::{collections::BTreeSet, fs, path::PathBuf};

fn read(path: &str) -> String {
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    fs::read_to_string(workspace.join(path)).unwrap()
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
        assert_eq!(rows(&page, "feature"), features(name), "{name}");
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
