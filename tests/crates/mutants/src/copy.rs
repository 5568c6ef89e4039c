//! A copy of the repository in which all mutants are planted.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    env, fs,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::find::{self, Mutant, Switch};

pub(crate) struct Copy {
    directory: PathBuf,
    target: PathBuf,
    pub(crate) mutants: Vec<Mutant>,
    /// The numbers of those that compile.
    pub(crate) planted: BTreeSet<usize>,
}

impl Copy {
    /// Plants the mutants of the files in `places`, without those that do not compile. The copy of
    /// other code is in another folder of `directory`, and so is all that is kept about it.
    pub(crate) fn plant(directory: &Path, places: &[&str]) -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3);
        let root = root.context("the root of the repository")?;
        let list = [
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ];
        let list = Command::new("git").args(list).current_dir(root).output()?;
        ensure!(list.status.success(), "git ls-files failed");
        let names = String::from_utf8(list.stdout)?;
        let mut files = Vec::new();
        let mut digest = DefaultHasher::new();
        for name in names.split_terminator('\0') {
            let Ok(bytes) = fs::read(root.join(name)) else {
                continue; // It has been deleted.
            };
            if !name.ends_with(".md") {
                (name, &bytes).hash(&mut digest);
            }
            files.push((name, bytes));
        }
        let folder = directory.join(format!("{:016x}", digest.finish()));
        let mut copy = Self {
            directory: folder.join("copy"),
            target: directory.join("target"),
            mutants: Vec::new(),
            planted: BTreeSet::new(),
        };
        let is_chosen = |name: &str| {
            let is_of_tests = name.ends_with("tests.rs") || name.contains("/tests/");
            let is_inside = places.iter().any(|place| name.starts_with(place));
            name.ends_with(".rs") && !is_of_tests && is_inside
        };
        let mut sources = Vec::new();
        for (name, bytes) in files {
            if is_chosen(name) {
                sources.push((name, String::from_utf8(bytes)?));
            } else if name == "lock-runtime/src/lib.rs" {
                let text = String::from_utf8(bytes)?;
                let module = "#[doc(hidden)]\npub mod mutants;\n\nmod client;";
                copy.write(name, text.replacen("mod client;", module, 1).as_bytes())?;
            } else {
                copy.write(name, &bytes)?;
            }
        }
        // Those that did not compile the last time.
        let path = copy.beside("refused.tsv");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut refused: HashSet<Mutant> = text.lines().map(str::parse).collect::<Result<_>>()?;
        loop {
            let switches = copy.write_all(&sources, &refused)?;
            let new = copy.refused(&switches)?;
            if new.is_empty() {
                return Ok(copy);
            }
            println!("{} mutants do not compile", new.len());
            refused.extend(new.iter().map(|&number| copy.mutants[number].clone()));
            let lines: Vec<_> = refused.iter().map(Mutant::to_string).collect();
            fs::write(&path, lines.join("\n"))?;
        }
    }

    /// A file of what is kept about this code.
    pub(crate) fn beside(&self, name: &str) -> PathBuf {
        self.directory.with_file_name(name)
    }

    /// Writes a file, unless the copy has it as it is: then it is not compiled again.
    fn write(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.directory.join(file);
        if fs::read(&path).is_ok_and(|old| old == bytes) {
            return Ok(());
        }
        fs::create_dir_all(path.parent().context("a folder")?)?;
        Ok(fs::write(path, bytes)?)
    }

    /// Returns the switches in each file of the copy.
    fn write_all(
        &mut self,
        sources: &[(&str, String)],
        refused: &HashSet<Mutant>,
    ) -> Result<HashMap<String, Vec<Switch>>> {
        self.mutants.clear();
        let mut switches = HashMap::new();
        for (file, source) in sources {
            let planted = find::plant(file, source, &mut self.mutants, refused)?;
            self.write(file, planted.text.as_bytes())?;
            switches.insert((*file).to_owned(), planted.switches);
        }
        self.planted = (0..self.mutants.len())
            .filter(|&it| !refused.contains(&self.mutants[it]))
            .collect();
        let switch = format!(
            "{}\nconst COUNT: usize = {};\n",
            include_str!("switch.rs"),
            self.mutants.len()
        );
        self.write("lock-runtime/src/mutants.rs", switch.as_bytes())?;
        Ok(switches)
    }

    /// A cargo command in the copy, whose code is optimized a little, with its assertions.
    pub(crate) fn cargo(&self, arguments: &[&str]) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo
            .args(arguments)
            .args(["--all-features", "--locked", "--message-format=json"])
            .current_dir(&self.directory)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_OPT_LEVEL", "1")
            .env("CARGO_INCREMENTAL", "0")
            .env("RUSTFLAGS", "--cap-lints=allow");
        cargo
    }

    /// Returns the mutants that do not compile.
    fn refused(&self, switches: &HashMap<String, Vec<Switch>>) -> Result<HashSet<usize>> {
        let packages = ["check", "--tests", "-p", "lock-runtime", "-p", "lock-tower"];
        let output = self.cargo(&packages).stderr(Stdio::inherit()).output()?;
        let mut refused = HashSet::new();
        if output.status.success() {
            return Ok(refused);
        }
        let mut others = Vec::new();
        for line in String::from_utf8(output.stdout)?.lines() {
            let message: Value = serde_json::from_str(line)?;
            let message = &message["message"];
            if message["level"] != "error" {
                continue;
            }
            let of_message = message["spans"].as_array().into_iter().flatten();
            let of_hints = (message["children"].as_array().into_iter().flatten())
                .flat_map(|child| child["spans"].as_array().into_iter().flatten());
            let found = of_message.chain(of_hints).find_map(|span| {
                let start = span["byte_start"].as_u64()? as usize;
                let end = span["byte_end"].as_u64()? as usize;
                (switches.get(span["file_name"].as_str()?)?.iter())
                    .filter(|it| it.range.start <= start && end <= it.range.end)
                    .min_by_key(|it| it.range.len())
            });
            match found {
                Some(switch) => {
                    refused.insert(switch.mutant);
                }
                None => others.push(message["rendered"].to_string()),
            }
        }
        if refused.is_empty() {
            bail!("errors outside of mutants: {}", others.join("\n"));
        }
        Ok(refused)
    }
}
