({
  init: () => ({ query: '', found: null, page: 0, chosen: [], submitted: false }),
  view: (state, kit, config) => {
    const find = () => {
      state.found = config.items.filter(item => item.name.toLowerCase().includes(state.query.trim().toLowerCase()));
      state.page = 0;
    };
    const shown = (state.found || []).slice(4 * state.page, 4 * state.page + 4);
    const last = Math.ceil((state.found || []).length / 4) - 1;
    return [kit.bar(kit.input('query', 'Search for', state, 'query'), kit.button('find', 'Find', kit.go(find))),
      ...shown.map(item => kit.row(`${item.name}, ${item.detail}`, kit.text(`${item.name}, ${item.detail}`),
        kit.button(`choose-${item.id}`, state.chosen.includes(item.id) ? 'Take out' : 'Choose', kit.set(() => {
          state.chosen = state.chosen.includes(item.id) ? state.chosen.filter(id => id !== item.id)
            : [...state.chosen, item.id];
        })))),
      state.found === null ? null : kit.bar(
        kit.button('previous', 'Previous', kit.go(() => { state.page -= 1; }), { disabled: state.page <= 0 }),
        kit.text(`${state.found.length} found`, 'note'),
        kit.button('next', 'Next', kit.go(() => { state.page += 1; }), { disabled: state.page >= last })),
      kit.bar(kit.text(`${state.chosen.length} chosen`, 'note'))];
  },
  goals: (state, config) => [...config.wanted.map(id => state.chosen.includes(id)),
    state.chosen.every(id => config.wanted.includes(id))],
})
