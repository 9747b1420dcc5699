//! The shapes of functions and types: how many parameters a function has, whose fields other files touch, and which names two crates
//! give to different types. What broke a rule when it was written is on a list; nothing new may come, and what was mended leaves the list.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use syn::{
    FieldsNamed, ImplItemFn, ItemEnum, ItemFn, ItemImpl, ItemMod, ItemStruct, ItemTrait, Signature,
    TraitItemFn, Type, Visibility, visit::Visit,
};

use crate::{compare_with_list, files, root, shown};

const MAX_PARAMETERS: usize = 6;
/// Files with methods of one type, if other files touch its fields.
const MAX_FILES_OF_METHODS: usize = 2;

/// What the sources of one crate define, without their tests.
#[derive(Default)]
struct Shapes {
    /// Functions with more than [`MAX_PARAMETERS`], by file.
    long: BTreeSet<String>,
    /// Types with a field that is neither private nor public, and the files of their methods.
    open: BTreeSet<String>,
    methods: BTreeMap<String, BTreeSet<String>>,
    /// Names of the types that are visible outside of their file.
    types: BTreeSet<String>,
    file: String,
}

fn is_of_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("cfg") && list.tokens.to_string() == "test"
    })
}

fn is_restricted(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Restricted(_))
}

impl Shapes {
    fn function(&mut self, signature: &Signature) {
        if signature.inputs.len() > MAX_PARAMETERS {
            self.long.insert(format!("{} {}", self.file, signature.ident));
        }
    }

    fn name(&mut self, visibility: &Visibility, name: &syn::Ident) {
        if !matches!(visibility, Visibility::Inherited) {
            self.types.insert(name.to_string());
        }
    }
}

impl<'ast> Visit<'ast> for Shapes {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_of_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.function(&item.sig);
        syn::visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.function(&item.sig);
        syn::visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        self.function(&item.sig);
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        self.name(&item.vis, &item.ident);
        if let syn::Fields::Named(FieldsNamed { named, .. }) = &item.fields
            && named.iter().any(|field| is_restricted(&field.vis))
        {
            self.open.insert(item.ident.to_string());
        }
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        self.name(&item.vis, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.name(&item.vis, &item.ident);
        syn::visit::visit_item_trait(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if let (None, Type::Path(of)) = (&item.trait_, &*item.self_ty)
            && let Some(last) = of.path.segments.last()
        {
            self.methods.entry(last.ident.to_string()).or_default().insert(self.file.clone());
        }
        syn::visit::visit_item_impl(self, item);
    }
}

/// Whether a file below `src` belongs to the product rather than to its tests.
fn is_of_product(inside: &Path) -> bool {
    let tests = |part: &str| ["tests", "testing"].contains(&part) || part.ends_with("_tests");
    !inside.with_extension("").iter().any(|part| tests(part.to_str().unwrap()))
}

/// The shapes of each crate, by its folder.
fn shapes() -> BTreeMap<String, Shapes> {
    let mut crates = BTreeMap::<String, Shapes>::new();
    for path in files(&[".rs"]) {
        let file = shown(&path);
        let Some((folder, inside)) = file.split_once("/src/") else { continue };
        if !is_of_product(Path::new(inside)) {
            continue;
        }
        let text = fs::read_to_string(root().join(&path)).unwrap();
        let shapes = crates.entry(folder.to_owned()).or_default();
        shapes.file.clone_from(&file);
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        shapes.visit_file(&parsed);
    }
    assert!(crates.len() > 10, "the sources are found");
    crates
}

#[test]
fn house_functions_have_at_most_six_parameters() {
    let found = shapes().into_values().flat_map(|shapes| shapes.long).collect();
    let list = include_str!("parameters.txt");
    compare_with_list(
        "a context or a type of its own for what belongs together",
        &found,
        "parameters.txt",
        list,
    );
}

#[test]
fn house_fields_are_private_or_their_methods_stand_together() {
    let mut found = BTreeSet::new();
    for (folder, shapes) in shapes() {
        for name in &shapes.open {
            if shapes.methods.get(name).is_some_and(|files| files.len() > MAX_FILES_OF_METHODS) {
                found.insert(format!("{folder} {name}"));
            }
        }
    }
    compare_with_list("fields that several rooms touch", &found, "halls.txt", include_str!("halls.txt"));
}

#[test]
fn house_types_of_two_crates_have_different_names() {
    let mut crates = BTreeMap::<String, BTreeSet<String>>::new();
    for (folder, shapes) in shapes() {
        for name in shapes.types {
            crates.entry(name).or_default().insert(folder.clone());
        }
    }
    crates.retain(|_, folders| folders.len() > 1);
    let found = crates.into_keys().collect();
    compare_with_list("a name that another crate has", &found, "homonyms.txt", include_str!("homonyms.txt"));
}

#[test]
fn house_shapes_are_read() {
    let mut shapes = Shapes { file: "a.rs".to_owned(), ..Shapes::default() };
    let text = "pub struct A { pub(crate) b: u8, c: u8 }
        impl A { fn f(&self, a: u8, b: u8, c: u8, d: u8, e: u8, f: u8) {} fn g(&self, a: u8) {} }
        impl Clone for A { fn clone(&self) -> Self { *self } }
        struct Private { pub d: u8 }
        #[cfg(test)] mod tests { pub struct OfTests; fn h(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8) {} }";
    shapes.visit_file(&syn::parse_file(text).unwrap());
    let set = |items: &[&str]| items.iter().map(|&item| item.to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(shapes.long, set(&["a.rs f"]));
    assert_eq!(shapes.open, set(&["A"]));
    assert_eq!(shapes.methods["A"], set(&["a.rs"]));
    assert_eq!(shapes.types, set(&["A"]));
}
